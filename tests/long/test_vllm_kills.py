"""The real vLLM on CPU, killed at seeded moments of generate and extract, and the flow with it.

``make test`` does so in generate, and ends there; ``make test-long`` in both steps.
Compared with a run that nothing disturbed, on another state folder: the same token ids, everything that was committed
before a kill left as it was, and hidden states within the parity gate's bound. Greedy ids are equal here because the
target computes in float32: which requests share a batch moves its logits by far less than the gap of any near-tie of
these answers. (In bfloat16 it would not.)
"""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil
import pytest
from standin.processes import living, running
from standin.runs import Zygote
from standin.waiting import more, wait_for

from infra.config.load import build_round, load_round, round_file
from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.engines.client.extraction import States
from infra.gates.agreement import Side, compare
from infra.gates.capture import Head
from infra.gates.parity import parity_gate
from infra.machine.processes.guarded import ProcessRecord, recorded
from infra.round.context import RoundContext
from infra.round.states import faulty_shards
from infra.store.answers import read_answers
from infra.store.reader import StatesReader

SEED = 20_27
LIMIT = 1500.0
IN_GENERATE = [("engine core", "generate"), ("flow", "generate")]
IN_EXTRACT = [("API server", "extract"), ("flow", "extract")]
"""(what to kill, in which step), in order; the last kill ends the run."""


@dataclass
class Runs:
    """The tiny round on a state folder of its own, run by flows that can be killed."""

    folder: Path
    config: RoundConfig
    models: Path
    zygote: Zygote
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    _flow: int = 0

    @property
    def settings(self) -> Settings:
        """Where it runs."""
        return Settings(state_dir=self.folder / "state", models_path=self.models)

    @cached_property
    def round(self) -> RoundContext:
        """The round as a process on this state folder sees it."""
        return RoundContext(self.config, self.settings)

    @property
    def log(self) -> str:
        """The end of the flows' log."""
        return (self.folder / "flow.log").read_text()[-3000:]

    def start(self) -> None:
        """Start a flow."""
        self.folder.mkdir(exist_ok=True)
        environment = {"EAGLE3_STATE_DIR": str(self.settings.state_dir), "EAGLE3_MODELS_PATH": str(self.models)}
        fields = self.config.model_dump(mode="json")
        self._flow = self.zygote.start(fields, environment, self.folder / "flow.log")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait while the flow runs."""
        wait_for(condition, what, LIMIT, lambda: running(self._flow))

    def kill_flow(self, step: str) -> None:
        """End the flow by SIGKILL; nothing of it may be left."""
        os.kill(self._flow, signal.SIGKILL)
        assert self.zygote.status() == -signal.SIGKILL, self.log
        self.kills["flow", step] += 1
        wait_for(lambda: living(self.settings.state_dir) == [], "nothing is left of a killed flow", LIMIT)

    def kill_engine(self, what: str, step: str) -> None:
        """End the API server or its engine alone by SIGKILL; both must go, and others come, by the flow itself."""
        [record] = self._servers()
        server = psutil.Process(record.child_pid)
        tree = [server, *server.children(recursive=True)]
        [core] = [process for process in tree if "EngineCore" in process.name() or "EngineCore" in cmdline(process)]
        (core if what == "engine core" else server).kill()
        self.kills[what, step] += 1
        self.until(lambda: any(item.child_pid != server.pid for item in self._servers()), f"another server for {step}")
        assert not any(map(running, tree)), "the engine outlived its server"

    def answered(self) -> dict[str, list[int]]:
        """Token ids of the answers so far, by sample: in the journal and in the store."""
        found = {
            name: answer.answer_ids for name, answer in read_answers(self.round.store, self._prefix("answers")).items()
        }
        for journal in self.round.scratch.glob("answers-*.jsonl"):
            whole = [line for line in journal.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found |= {item["sample_id"]: item["answer_ids"] for item in map(json.loads, whole)}
        return found

    def committed(self) -> dict[str, tuple[int, int, bytes]]:
        """(inode, mtime, bytes) of every file of the shards that are committed, and of the samples, by path."""
        root = self.settings.state_dir / "store"
        hidden = [
            path for manifest in root.glob("rounds/*/hidden/*/*/manifest.parquet") for path in manifest.parent.iterdir()
        ]
        found = [path for path in [*hidden, *root.glob("rounds/*/samples/*/*")] if not path.name.startswith(".")]
        return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    def shards(self) -> int:
        """Shards that are committed."""
        return len(list(self.settings.state_dir.glob("store/rounds/*/hidden/*/*/manifest.parquet")))

    def prepared(self) -> bool:
        """Whether the answers are made into samples."""
        return any(self.settings.state_dir.glob("store/rounds/*/samples/current.json"))

    def verified(self) -> bool:
        """Whether extraction is over and was read back."""
        return any(self.settings.state_dir.glob("store/rounds/*/hidden/current.json"))

    def side(self, name: str) -> Side:
        """The hidden states of every sample, as the parity gate's comparison wants them."""
        reader = StatesReader(self.settings.store, self._prefix("hidden"))
        rows = [reader.read(row) for row in reader.rows]
        return Side(name, [States(row["hidden_states"], row["token_ids"], 0) for row in rows])

    def _prefix(self, step: str) -> str:
        return self.round.prefix(step)

    def _servers(self) -> list[ProcessRecord]:
        return [item for item in recorded(self.settings.run_dir) if item.alive and item.purpose.startswith("vllm")]


def cmdline(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


@pytest.fixture(scope="module")
def config() -> RoundConfig:
    changes = {
        "generate.concurrency": 4,
        "extract.concurrency": 4,
        "extract.shard_bytes": 2 << 20,
        "retention.states": "keep",
        # Another test's matter, and minutes of a reference in transformers.
        "gates.convention.reference": "none",
    }
    return build_round(load_round(round_file("tiny")).model_dump(mode="json"), changes)


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param([IN_GENERATE], marks=pytest.mark.timeout(900), id="generate"),
        pytest.param(
            [IN_GENERATE, IN_EXTRACT], marks=[pytest.mark.timeout(5400), pytest.mark.long], id="generate-and-extract"
        ),
    ],
)
def test_a_round_whose_flow_and_engines_are_killed_ends_as_if_they_had_not_been(
    schedule: list[list[tuple[str, str]]],
    zygote: Zygote,
    config: RoundConfig,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed, calm = (Runs(tmp_path / name, config, models, zygote) for name in ("killed", "calm"))
    chance = random.Random(SEED)
    answers: dict[str, list[int]] = {}
    files: dict[str, tuple[int, int, bytes]] = {}
    kept = []
    for kills in schedule:
        killed.start()
        for what, step in kills:
            if step == "generate":
                further = more(lambda: len(killed.answered()), chance.randint(4, 8))
            else:
                further = more(killed.shards, chance.randint(1, 2))
            killed.until(further, f"{step} has gone on a little")
            if what == "flow":
                killed.kill_flow(step)
            else:
                killed.kill_engine(what, step)
            now, made = killed.answered(), killed.committed()
            assert answers.items() <= now.items()
            assert files.items() <= made.items()
            answers, files = now, made
            kept.append(f"{what:12} in {step:9}: {len(now):3} answers and {killed.shards()} shards were kept")
    extracted = IN_EXTRACT in schedule
    for one in (killed, calm):
        one.start()
        one.until(one.verified if extracted else one.prepared, "what is compared is there")
        one.kill_flow("the end")

    assert answers.items() <= killed.answered().items()
    assert files.items() <= killed.committed().items()
    assert killed.round.keys == calm.round.keys
    assert killed.answered() == calm.answered()
    assert [sample.input_ids for sample in killed.round.samples] == [sample.input_ids for sample in calm.round.samples]
    same = f"{len(calm.answered())} answers, {sum(map(len, calm.answered().values()))} token ids, all the same"
    with capsys.disabled():
        print("", *kept, same, sep="\n  ")
    if extracted:
        assert faulty_shards(killed.round, deep=True) == {}
        states_agree(killed, calm, capsys)


def states_agree(killed: Runs, calm: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Hold the states of both against each other, as the parity gate does."""
    target = killed.round.target
    found = compare(target, calm.config.extract.taps, calm.side("calm"), killed.side("killed"), None, Head(target))
    told = (
        f"tap {tap.tap}: median {tap.median:.2g}, worst {tap.worst:.2g}, bound {tap.bound:.2g}" for tap in found.taps
    )
    with capsys.disabled():
        print("", *told, sep="\n  ")
    parity_gate(found)
