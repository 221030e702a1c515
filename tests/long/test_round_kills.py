"""A whole round under a seeded schedule of SIGKILLs: it ends, bit for bit, as if nothing had been.

``make test`` runs a sample of the schedule in which everything is killed that can be; ``make test-long`` all of it.
Killed are the flow's process, the Prefect worker that runs it, engine servers (while they load and while they serve),
the trainer, and the guards of both. A flow or worker that is killed ends a run; the next run goes on. All else is
brought back by the run itself.
"""

import json
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prefect.states import State
from standin.machine import REPOSITORY, Machine, new_machine
from standin.processes import living, running
from standin.runs import Zygote
from standin.waiting import more, wait_for

from deployments.api import connect
from deployments.launch import Handle, bring_up, detached
from infra.config.settings import Settings
from infra.machine.detached import this_process
from infra.machine.host import port_in_use
from infra.machine.processes.guarded import ProcessRecord, recorded
from infra.store.manifest import MANIFEST, Manifest
from infra.store.objects import ObjectStore

LIMIT = 1500.0
DELAY = {"STANDIN_DELAY": "0.1"}
CONVERSATIONS = 36
EPOCHS, CHECKPOINTS = 3, 4
PROFILES = {"generate": "plain", "extract": "extract"}
"""What the stand-in's journal calls the server of a step."""
FLOW = f'''
"""The flow eagle3 as a worker runs it here: with the stand-in in vLLM's place."""
import os
import sys

sys.path.append({str(REPOSITORY / "tests")!r})
if "PREFECT__FLOW_RUN_ID" in os.environ:
    from standin.place import install

    install()
from flows.eagle3 import eagle3
'''


Schedule = list[list[tuple[str, str]]]
"""(what to kill, in which step), in order; a list for each run, the last kill of which ends it."""


def everywhere(chance: random.Random) -> Schedule:
    """Kills in every step.

    In every step the flow dies once; what else dies there comes in an order that the seed decides.
    """

    def first(step: str, *what: str) -> list[tuple[str, str]]:
        return [(item, step) for item in chance.sample(what, len(what))]

    return [
        [("flow", "plan")],
        [("flow", "preflight")],
        [("loading engine", "generate"), *first("generate", "engine", "engine", "guard"), ("worker", "generate")],
        [*first("generate", "engine"), ("flow", "generate")],
        [("flow", "prepare")],
        [("flow", "convention")],
        [("loading engine", "extract"), *first("extract", "engine", "guard"), ("worker", "extract")],
        [*first("extract", "engine", "engine"), ("flow", "extract")],
        [("flow", "verify")],
        [("flow", "cleanup")],
        [*first("train", "trainer", "guard"), ("flow", "train")],
        [*first("train", "trainer"), ("worker", "train")],
        [*first("evaluate", "engine", "engine"), ("flow", "evaluate")],
        [("flow", "publish")],
        [("flow", "cleanup after")],
        [("flow", "report")],
    ]


def sampled(chance: random.Random) -> Schedule:
    """Some runs of the schedule, in its order: each kills something, in one step or another, that the others do not."""
    whole = everywhere(chance)
    seen, taken = set[str](), set[int]()
    for number in chance.sample(range(len(whole)), len(whole)):
        killed = {what for what, _ in whole[number]}
        if not killed <= seen:
            seen |= killed
            taken.add(number)
    return [whole[number] for number in sorted(taken)]


class Workers:
    """Real Prefect workers with the machine's round deployed, one at a time, brought up as ``eagle3 up`` does it."""

    def __init__(self, machine: Machine, api: str) -> None:
        self._api = api
        self._worker: Handle | None = None
        checkout = machine.folder / "checkout"
        flows, rounds = checkout / "flows", checkout / "deployments" / "rounds"
        flows.mkdir(parents=True)
        rounds.mkdir(parents=True)
        for name in ("parity", "reextract", "cleanup"):
            (flows / f"{name}.py").symlink_to(REPOSITORY / "flows" / f"{name}.py")
        (flows / "eagle3.py").write_text(FLOW)
        (rounds / "small.yaml").write_text(json.dumps(machine.fields))

    @property
    def pid(self) -> int | None:
        """The worker's pid."""
        return None if self._worker is None else self._worker.pid

    def up(self) -> None:
        """Bring a worker up, beside the test's Prefect server."""
        port = urlsplit(self._api).port
        assert port is not None
        _, self._worker = bring_up(Settings(), port, detached, this_process())

    def start(self) -> None:
        """Start the round's deployment."""
        if self._worker is None:
            self.up()
        with connect(self._api) as client:
            deployment = client.read_deployment_by_name("eagle3/small")
            self._run = client.create_flow_run_from_deployment(deployment.id).id

    def kill(self) -> None:
        """End the worker by SIGKILL."""
        assert self._worker is not None
        os.kill(self._worker.pid, signal.SIGKILL)
        os.waitpid(self._worker.pid, 0)

    def state(self) -> State[Any] | None:
        """The run's state when it is final."""
        with connect(self._api) as client:
            state = client.read_flow_run(self._run).state
        return state if state is not None and state.is_final() else None

    def close(self) -> None:
        """End the worker and what it runs."""
        if self._worker is not None:
            self._worker.stop()


def start(zygote: Zygote, machine: Machine, **more: str) -> int:
    """Start a run on the machine; each completion takes a moment, so that a kill can fall between two. Its pid."""
    return zygote.start(machine.fields, {**machine.environment, **DELAY, **more}, machine.folder / "flow.log")


def steps_made(machine: Machine) -> int:
    """Training steps of all attempts, by the trainer's own log; 0 once the round's scratch is gone."""
    logs = list(machine.folder.glob("state/scratch/small/train-*/events.jsonl"))
    return sum('"train"' in line for line in logs[0].read_text().splitlines()) if logs else 0


class Vandal:
    """Runs the round again and again and kills by schedule; looks after every kill that nothing is left or lost."""

    def __init__(
        self, machine: Machine, zygote: Zygote, workers: Workers, touches: dict[str, int], chance: random.Random
    ) -> None:
        self.machine, self.zygote, self.workers, self._touches = machine, zygote, workers, touches
        self.chance = chance
        self.kills: Counter[tuple[str, str]] = Counter()
        self.shards: dict[str, tuple[int, int]] = {}
        self.trained = 0
        self._flow = 0

    def run(self, kills: list[tuple[str, str]]) -> None:
        """One run of the round, to the kill that ends it."""
        (last, step), told = kills[-1], {}
        if last == "worker":
            self.workers.start()
            before = len(self.machine.events())
            self._flow = wait_for(lambda: self._begun(before), "the worker's run begins", LIMIT)
        else:
            if step not in ("generate", "extract", "train", "evaluate"):
                told["STANDIN_FALL"] = f"{step}:{self.chance.randint(1, self._touches[step])}"
            self._flow = start(self.zygote, self.machine, **told)
        for what, where in kills[:-1]:
            self._kill_and_see_it_come_back(what, where)
        if not told:
            self._wait(self._busy(step), f"{step} is in full swing")
        if last == "worker":
            self.workers.kill()
            self.kills["worker", self._step()] += 1
            self.workers.up()
            state = self.workers.state()
            assert state is not None
            assert state.is_crashed()
        else:
            if not told:
                os.kill(self._flow, signal.SIGKILL)
            status = self.zygote.status()
            assert status == -signal.SIGKILL, self._log()
            self.kills["flow", self._step()] += 1
        self.see_nothing_left(f"{last} killed in {step}")

    def _kill_and_see_it_come_back(self, what: str, step: str) -> None:
        if what == "loading engine":
            record = self._wait(lambda: self._loading(step), f"a server for {step} loads")
            victim = record.child_pid
        else:
            victim = self._wait(self._busy(step), f"{step} is in full swing")
            if what == "guard":
                victim = next(item.guard_pid for item in self._alive() if item.child_pid == victim)
        launched = self.machine.launches().total()
        os.kill(victim, signal.SIGKILL)
        self.kills[what, self._step()] += 1
        if step == "train":
            self._wait(more(lambda: steps_made(self.machine), 1), "the training goes on")
        else:
            self._wait(lambda: self.machine.launches().total() > launched, f"another server for {step}")
        self._wait(lambda: not running(victim), "what was killed is gone")

    def _busy(self, step: str) -> Callable[[], int]:
        """The pid of the step's server or trainer, once it has done a little more and has several things in hand."""
        if step == "train":
            further = more(lambda: steps_made(self.machine), self.chance.randint(4, 9))

            def trainer() -> int:
                trainers = [item.child_pid for item in self._alive() if item.purpose.startswith("train")]
                return trainers[0] if trainers and further() else 0

            return trainer
        further = more(self._requests, self.chance.randint(2, 5))
        profile = PROFILES.get(step) or self.chance.choice(("plain", "bench"))

        def serving() -> int:
            newest = self.machine.events()[-1]
            # What a killed server had in hand is tried alone on the next one: a death then would be that sample's.
            several = newest.get("profile") == profile and newest["beside"] > 0
            return int(newest["pid"]) if several and further() and self._step() == step else 0

        return serving

    def _loading(self, step: str) -> ProcessRecord | None:
        """The server that was started and does not serve yet."""
        up = {event["pid"] for event in self.machine.events() if "launch" in event}
        found = [item for item in self._alive() if item.purpose.endswith(step) and item.child_pid not in up]
        return found[0] if found else None

    def see_nothing_left(self, what: str) -> None:
        """No process and no port is left of the run, and no finished shard was written again."""
        workers = [] if self.workers.pid is None else [self.workers.pid]
        wait_for(lambda: living(self.machine.folder / "state") == workers, f"no process is left, {what}", LIMIT)
        ports = {event["port"] for event in self.machine.events() if "launch" in event}
        assert not [port for port in ports if port_in_use(port)]
        made = {path: seen for path, seen in self.machine.written("hidden").items() if path.endswith(MANIFEST)}
        assert self.shards.items() <= made.items(), "a finished shard is never written again"
        self.shards = made
        self.trained = max(self.trained, steps_made(self.machine))

    def _alive(self) -> list[ProcessRecord]:
        return [item for item in recorded(Settings().run_dir) if item.alive]

    def _begun(self, before: int) -> int:
        return next((int(event["pid"]) for event in self.machine.events()[before:] if "step" in event), 0)

    def _wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait while the run goes on."""
        return wait_for(condition, what, LIMIT, lambda: running(self._flow))

    def _step(self) -> str:
        return str([event["step"] for event in self.machine.events() if "step" in event][-1])

    def _requests(self) -> int:
        return sum("request" in event for event in self.machine.events())

    def _log(self) -> str:
        return (self.machine.folder / "flow.log").read_text()[-3000:]


TELLS_TIME = ("report.json", "report.md", "README.md", "trainer.log", "round.yaml")
"""Files of the store that say when, where or how fast; the others are compared by their bytes."""


def lasting(machine: Machine) -> dict[str, Any]:
    """All that the machine's store holds, by path, without times and speeds."""
    root = machine.folder / "state" / "store"
    ObjectStore(f"file://{root}").sweep_temporaries(older_than_seconds=0)
    return {str(path.relative_to(root)): timeless(path) for path in root.rglob("*") if path.is_file()}


def timeless(path: Path) -> Any:
    """What of a file of the store must be the same in every run."""
    data = path.read_bytes()
    if path.name == MANIFEST:
        return replace(Manifest.from_bytes(data, str(path)), created="").to_bytes()
    if path.name in TELLS_TIME or path.suffix == ".png":
        return ...
    if path.name == "current.json":
        return json.loads(data)["key"]
    if path.name == "training.json":
        return {name: value for name, value in json.loads(data).items() if name not in ("seconds", "tokens", "resumed")}
    if path.name == "evaluation.json":
        found = json.loads(data)
        speeds = {"draft", "plain"}
        return found | {"measured": [{k: v for k, v in one.items() if k not in speeds} for one in found["measured"]]}
    if path.name == "publication.json":
        found = json.loads(data)
        told = {what: found[what] for what in ("files", "sizes")}
        cards = "README.md"  # they tell of times
        return found | {what: {n: v for n, v in of.items() if not n.endswith(cards)} for what, of in told.items()}
    return data


def beside_the_store(machine: Machine) -> set[str]:
    """Files of the machine's state folder that are neither in the store nor logs."""
    state = machine.folder / "state"
    kept = [path for name in ("run", "scratch") for path in (state / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(state)) for path in kept}


def training(machine: Machine) -> dict[str, Any]:
    """The stored result of the training."""
    [path] = machine.folder.glob("state/store/rounds/small/draft/*/training.json")
    return dict(json.loads(path.read_text()))


def steps_wanted(machine: Machine) -> int:
    """Training steps of the stored draft."""
    return int(training(machine)["steps"])


def largest_shard(machine: Machine) -> int:
    """Rows of the largest shard."""
    found = machine.folder.glob(f"state/store/rounds/small/hidden/*/*/{MANIFEST}")
    return max(len(Manifest.from_bytes(path.read_bytes(), str(path)).rows) for path in found)


def asked(machine: Machine) -> Counter[str]:
    """Requests to engines, by the step in which they were made."""
    found: Counter[str] = Counter()
    step = ""
    for event in machine.events():
        step = event.get("step", step)
        found[step] += "request" in event
    return found


@pytest.mark.parametrize(
    ("schedule", "seed"),
    [
        pytest.param(sampled, 20_28, marks=pytest.mark.timeout(900), id="sampled"),
        pytest.param(everywhere, 20_26, marks=[pytest.mark.timeout(3600), pytest.mark.long], id="everywhere"),
    ],
)
def test_a_round_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    schedule: Callable[[random.Random], Schedule],
    seed: int,
    api: str,
    zygote: Zygote,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calm, killed = (new_machine(tmp_path / name) for name in ("calm", "killed"))
    for machine in (calm, killed):
        things = [{"id": f"c{number}", "turns": [f"Tell of {number}.", "More."]} for number in range(CONVERSATIONS)]
        Path(machine.fields["prompts"]["source"]).write_text("\n".join(map(json.dumps, things)))
        machine.fields["prompts"]["count"] = CONVERSATIONS
        machine.fields["train"] |= {"epochs": EPOCHS, "checkpoints_per_epoch": CHECKPOINTS, "max_steps": None}
    start(zygote, calm)
    assert zygote.status() == 0, (calm.folder / "flow.log").read_text()[-3000:]
    touches = {event["left"]: event["touches"] for event in calm.events() if "left" in event}

    told = {**killed.environment, **DELAY, "EAGLE3_ROOT": str(killed.folder / "checkout")}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    workers = Workers(killed, api)
    chance = random.Random(seed)
    vandal = Vandal(killed, zygote, workers, touches, chance)
    planned = schedule(chance)
    try:
        for kills in planned:
            vandal.run(kills)
        workers.start()
        last = wait_for(workers.state, "the last run ends", LIMIT)
        assert last is not None
        assert last.is_completed()
        vandal.see_nothing_left("at the end")
    finally:
        workers.close()
    with capsys.disabled():
        print(table(vandal, calm))

    assert vandal.kills.total() == sum(map(len, planned))
    assert {what for what, _ in vandal.kills} == {"flow", "worker", "engine", "loading engine", "trainer", "guard"}
    ended_in = {step for kills in planned for what, step in kills if what == "flow"}
    assert {step for what, step in vandal.kills if what == "flow"} == ended_in
    assert schedule is sampled or ended_in == set(touches)
    mine, others = lasting(killed), lasting(calm)
    assert mine.keys() == others.keys()
    assert [path for path in mine if mine[path] != others[path]] == []
    assert beside_the_store(killed) == beside_the_store(calm)
    assert (training(killed)["resumed"] > 0) == any(step == "train" for kills in planned for _, step in kills)

    # In flight at a kill: as many answers as there are requests at once; and a shard, what is asked for ahead of it,
    # and the samples that are then tried alone.
    again, deaths = asked(killed) - asked(calm), Counter[str]()
    for (_, step), count in vandal.kills.items():
        deaths[step] += count
    assert again["generate"] <= deaths["generate"] * killed.fields["generate"]["concurrency"]
    assert again["extract"] <= deaths["extract"] * (largest_shard(calm) + 5 * killed.fields["extract"]["concurrency"])
    assert vandal.trained - steps_wanted(calm) <= deaths["train"] * math.ceil(steps_wanted(calm) / EPOCHS / CHECKPOINTS)


def table(vandal: Vandal, calm: Machine) -> str:
    """Kills by step and kind, and what was done twice."""
    kinds = sorted({what for what, _ in vandal.kills})
    lines = ["", f"  {'killed in':14}" + "".join(f"{kind:>16}" for kind in kinds)]
    for step in dict.fromkeys(event["step"] for event in calm.events() if "step" in event):
        counts = (vandal.kills[kind, step] or "" for kind in kinds)
        lines.append(f"  {step:14}" + "".join(f"{count:>16}" for count in counts))
    lines.append(
        f"  {'in all':14}"
        + "".join(f"{sum(vandal.kills[k, s] for k, s in vandal.kills if k == kind):>16}" for kind in kinds)
    )
    once, made = asked(calm), asked(vandal.machine)
    lines += [
        f"  {step}: {made[step]} requests where {once[step]} are needed" for step in ("generate", "extract", "evaluate")
    ]
    lines += [f"  train: {vandal.trained} steps where {steps_wanted(calm)} are needed"]
    lines += [f"  servers: {dict(vandal.machine.launches())} where {dict(calm.launches())} are needed"]
    return "\n".join(lines)
