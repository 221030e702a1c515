"""GPUs that are held, wedged, broken or lost: what is done about each, by policy.

The driver is a stand-in; the processes, their ends, and everything above the driver are real. Each scenario runs with
three policies; ``pytest -s`` prints the table.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from standin.gpus import GpuBox, Worker, build_library, stand_in_environment
from standin.leftover import Leftover, bystander, zombie
from standin.processes import running
from standin.waiting import wait_for

from infra.machine.host import port_in_use
from infra.machine.processes.ending import end_family
from infra.machine.processes.guard import identity_of
from infra.machine.processes.guarded import reap

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534
FREE = "gpu util=0"
STRICT = {"end_same_user": True, "reset": "if_alone", "quarantine": False}
"""Everything is allowed, and no GPU is left out."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can reset GPUs or start another user's process")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def worker(library: Path) -> Iterator[Worker]:
    with Worker(library) as worker:
        yield worker


@pytest.fixture
def box(tmp_path: Path, worker: Worker) -> GpuBox:
    return GpuBox(tmp_path, worker)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@dataclass
class Scene:
    """A scenario that has been set up.

    Args:
        lives: pids that must live afterwards, whatever the policy.
        ended: pids that must not, by column.
        on_line: changes the world while the code polls.
    """

    lives: tuple[int, ...] = ()
    ended: dict[str, tuple[int, ...]] | None = None
    on_line: Callable[[str], None] = lambda line: None


def healthy(box: GpuBox, stack: ExitStack) -> Scene:
    box.write(FREE, FREE)
    return Scene()


def own_leftover(box: GpuBox, stack: ExitStack) -> Scene:
    left = Leftover(box.run_dir)
    stack.callback(left.end)
    box.write(FREE, "gpu util=30", f"process gpu=1 pid={left.leader} used=60000")
    return Scene(ended=dict.fromkeys(COLUMNS, tuple(left.pids)))


def own_live_round(box: GpuBox, stack: ExitStack) -> Scene:
    left = Leftover(box.run_dir, owner_dies=False)
    stack.callback(left.end)
    box.write(FREE, "gpu util=30", f"process gpu=1 pid={left.leader} used=60000")
    return Scene(lives=tuple(left.pids))


def same_user(box: GpuBox, stack: ExitStack) -> Scene:
    pid = stack.enter_context(bystander())
    box.write(FREE, FREE, f"process gpu=1 pid={pid} used=60000")
    return Scene(ended={"strict": (pid,)})


def foreign(box: GpuBox, stack: ExitStack) -> Scene:
    pid = stack.enter_context(bystander(user=NOBODY))
    box.write(FREE, FREE, f"process gpu=1 pid={pid} used=60000")
    return Scene(lives=(pid,))


def foreign_small(box: GpuBox, stack: ExitStack) -> Scene:
    pid = stack.enter_context(bystander(user=NOBODY))
    box.write(FREE, FREE, f"process gpu=1 pid={pid} used=500")
    return Scene(lives=(pid,))


def zombie_holder(box: GpuBox, stack: ExitStack) -> Scene:
    box.write(FREE, FREE, f"process gpu=1 pid={stack.enter_context(zombie())} used=60000 lingers=1")
    box.after_reset(FREE, FREE)
    return Scene()


def wedged(box: GpuBox, stack: ExitStack) -> Scene:
    box.write(FREE, "gpu util=100")
    box.after_reset(FREE, FREE)
    return Scene()


def ecc(box: GpuBox, stack: ExitStack) -> Scene:
    box.write(FREE, "gpu ecc=3 rows=1 recovery=1")
    box.after_reset(FREE, FREE)
    return Scene()


def lost(box: GpuBox, stack: ExitStack) -> Scene:
    box.write(FREE, "gpu error=15")
    box.after_reset(FREE, FREE)
    return Scene()


def freed_late(box: GpuBox, stack: ExitStack) -> Scene:
    box.write(FREE, "gpu used=60000")

    def world(line: str) -> None:
        if "waiting for" in line:
            box.write(FREE, "gpu used=900")

    return Scene(on_line=world)


def reset_works(box: GpuBox, stack: ExitStack) -> Scene:
    box.write(FREE, "gpu used=60000")
    box.after_reset(FREE, FREE)
    return Scene()


def reset_fails(box: GpuBox, stack: ExitStack) -> Scene:
    box.write(FREE, "gpu used=60000")
    return Scene()


def mig(box: GpuBox, stack: ExitStack) -> Scene:
    box.write(FREE, "gpu mig=1")
    return Scene()


COLUMNS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (2, {}),
    "default, one to spare": (1, {}),
    "strict": (2, STRICT),
}
"""By column: the GPUs that the round wants (of two), and its policy."""

EXPECTED: dict[Callable[[GpuBox, ExitStack], Scene], tuple[str, str, str]] = {
    healthy: ("goes on", "goes on", "goes on"),
    own_leftover: ("ended; goes on", "ended; goes on", "ended; goes on"),
    own_live_round: ("stops", "quarantined; goes on", "stops"),
    same_user: ("stops", "quarantined; goes on", "ended; goes on"),
    foreign: ("stops", "quarantined; goes on", "stops"),
    foreign_small: ("shared; goes on", "goes on", "shared; goes on"),
    zombie_holder: ("waited; stops", "quarantined; goes on", "waited, reset; goes on"),
    wedged: ("waited; stops", "quarantined; goes on", "waited, reset; goes on"),
    ecc: ("stops", "quarantined; goes on", "reset; goes on"),
    lost: ("stops", "quarantined; goes on", "stops"),
    freed_late: ("waited; goes on", "quarantined; goes on", "waited; goes on"),
    reset_works: ("waited; stops", "quarantined; goes on", "waited, reset; goes on"),
    reset_fails: ("waited; stops", "quarantined; goes on", "waited, reset-failed; stops"),
    mig: ("stops", "quarantined; goes on", "stops"),
}
"""What is done in each scenario, by column. GPU 1 is the one in trouble."""

SEEN: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    yield
    rows = [("scenario", *COLUMNS)] + [
        (name, *(told.get(column, "") for column in COLUMNS)) for name, told in SEEN.items()
    ]
    print("\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows))


@needs_root
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("scenario", EXPECTED, ids=lambda scenario: scenario.__name__)
def test_what_is_done(
    scenario: Callable[[GpuBox, ExitStack], Scene], column: str, box: GpuBox, stack: ExitStack
) -> None:
    wanted, policy = COLUMNS[column]
    untouched = stack.enter_context(bystander())
    scene = scenario(box, stack)
    seconds = 30 if scenario is freed_late else 0.3
    outcome = box.clear(wanted, {**policy, "wait_seconds": seconds}, scene.on_line)
    expected = EXPECTED[scenario][list(COLUMNS).index(column)]
    SEEN.setdefault(scenario.__name__, {})[column] = str(outcome)
    assert str(outcome) == expected, outcome.texts
    assert running(untouched)
    assert all(map(running, scene.lives))
    assert not any(map(running, (scene.ended or {}).get(column, ())))
    assert len(box.resets) == ("reset" in expected)


def test_the_command_shows_and_touches_nothing_until_it_is_told(
    box: GpuBox, library: Path, stack: ExitStack, tmp_path: Path
) -> None:
    left = Leftover(box.run_dir)
    stack.callback(left.end)
    other = stack.enter_context(bystander())
    box.write(
        "gpu used=2000 util=5",
        f"process gpu=0 pid={left.leader} used=60000",
        "gpu name=H200",
        f"process gpu=1 pid={other} used=70000",
    )
    environment = os.environ | {
        **stand_in_environment(library),
        "EAGLE3_NVML_SCENARIO": str(box.scenario),
        "EAGLE3_STATE_DIR": str(tmp_path / "state"),
        "EAGLE3_GPUS_ALONE": "true",
    }
    command = [sys.executable, "-m", "deployments.cli", "gpu", "--json"]

    def gpus(*options: str) -> dict[str, Any]:
        done = subprocess.run([*command, *options], cwd=REPOSITORY, env=environment, capture_output=True, check=True)
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts

    shown = gpus()
    first, second = shown["gpus"]
    assert [gpu["holders"][0]["whose"] for gpu in (first, second)] == ["leftover", "same user"]
    assert (first["memory_used"], first["utilisation"], second["name"]) == (62000 << 20, 5, "H200")
    assert [trouble["kind"] for trouble in first["troubles"]] == ["unfreed", "held"]
    assert [trouble["kind"] for trouble in second["troubles"]] == ["held"]
    assert shown["acts"] == []
    assert all(map(running, [*left.pids, other]))
    box.write("gpu", f"process gpu=0 pid={left.leader} used=60000", FREE, f"process gpu=1 pid={other} used=70000")
    assert [act["action"] for act in gpus("--apply")["acts"]] == ["ended"]
    assert not any(map(running, left.pids))
    assert running(other)


def test_nobody_is_ended_while_enough_gpus_are_free(box: GpuBox, stack: ExitStack) -> None:
    other = stack.enter_context(bystander())
    box.write(FREE, f"gpu\nprocess gpu=1 pid={other} used=70000")
    outcome = box.clear(1, {"end_same_user": True, "reset": "if_alone"})
    assert outcome.actions == ["quarantined"]
    assert running(other)


def test_no_more_is_ended_than_the_round_lacks(box: GpuBox, stack: ExitStack) -> None:
    first, second = stack.enter_context(bystander()), stack.enter_context(bystander())
    box.write("gpu", f"process gpu=0 pid={first} used=70000", "gpu", f"process gpu=1 pid={second} used=70000", FREE)
    outcome = box.clear(2, {"end_same_user": True})
    assert outcome.actions == ["ended", "quarantined"]
    assert not running(first)
    assert running(second)


@needs_root
def test_no_more_is_reset_than_the_round_lacks(box: GpuBox) -> None:
    box.write("gpu util=100", "gpu util=100", FREE)
    box.after_reset(FREE, "gpu util=100", FREE)
    outcome = box.clear(2, {"reset": "if_alone", "wait_seconds": 0.1})
    assert outcome.actions == ["waited", "reset", "quarantined"]
    assert box.resets == ["--gpu-reset -i GPU-standin-0"]


def test_the_same_users_process_on_a_gpu_that_others_hold_too_is_left(box: GpuBox, stack: ExitStack) -> None:
    """Ending it would harm it and free nothing."""
    other = stack.enter_context(bystander())
    left = Leftover(box.run_dir, owner_dies=False)
    stack.callback(left.end)
    box.write("gpu", f"process gpu=0 pid={other} used=40000", f"process gpu=0 pid={left.leader} used=40000")
    outcome = box.clear(1, STRICT)
    assert outcome.actions == []
    assert not outcome.enough
    assert all(map(running, [other, *left.pids]))


@needs_root
def test_from_a_container_what_cannot_be_seen_is_not_taken_for_dead(tmp_path: Path, library: Path) -> None:
    """A process outside the container holds the memory, for all that can be seen from inside."""
    worker = Worker(library, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with worker:
        _in_a_container(GpuBox(tmp_path, worker))


def _in_a_container(box: GpuBox) -> None:
    box.write("gpu used=60000 util=100")
    box.after_reset(FREE)
    outcome = box.clear(1, {**STRICT, "wait_seconds": 0.1}, whole=False)
    assert outcome.actions == ["waited", "reset-refused"]
    assert "outside this container" in outcome.texts
    assert box.resets == []


def test_from_a_container_nobody_is_ended_by_the_drivers_pids(box: GpuBox, stack: ExitStack) -> None:
    """Nothing outside uses the GPUs, but whose the pids are is not known: here they may be anybody's."""
    innocent = stack.enter_context(bystander())
    box.write("gpu", f"process gpu=0 pid={innocent} used=60000")
    outcome = box.clear(1, {"end_same_user": True}, alone=True, whole=False)
    assert outcome.actions == ["not-ended"]
    assert running(innocent)


@needs_root
def test_a_reset_that_fails_forgives_nothing(box: GpuBox) -> None:
    box.write(f"{FREE} bus=0:1:0.0", f"{FREE} bus=0:2:0.0")
    box.log_xid("0:1:0", 79)
    box.log_xid("0:2:0", 79)
    outcome = box.clear(1, {"reset": "if_alone", "wait_seconds": 0.1})
    assert outcome.actions == ["reset-failed", "reset-failed"]
    assert (outcome.fit, len(outcome.unfit)) == ([], 2)


@needs_root
def test_a_reset_forgives_what_was_before_it_and_only_on_its_own_gpu(box: GpuBox) -> None:
    box.write(f"{FREE} bus=0:1:0.0", f"{FREE} bus=0:2:0.0")
    box.after_reset(f"{FREE} bus=0:1:0.0", f"{FREE} bus=0:2:0.0")
    box.log_xid("0:1:0", 79)
    box.log_xid("0:2:0", 79)
    policy = {"reset": "if_alone", "wait_seconds": 0.1}
    outcome = box.clear(1, policy)
    assert outcome.actions == ["reset", "quarantined"]
    assert (outcome.fit, box.resets) == ([0], ["--gpu-reset -i GPU-standin-0"])
    assert "Xid 79" in outcome.unfit[0]


@needs_root
def test_an_xid_after_the_reset_counts(box: GpuBox) -> None:
    box.write(f"{FREE} bus=0:1:0.0")
    box.after_reset(f"{FREE} bus=0:1:0.0")
    box.log_xid("0:1:0", 79, ahead=60)
    outcome = box.clear(1, {"reset": "if_alone", "wait_seconds": 0.1})
    assert outcome.actions == ["reset-failed"]
    assert "the reset did not help" in outcome.texts


@needs_root
def test_before_ampere_gpus_on_one_nvlink_are_reset_together(box: GpuBox) -> None:
    box.write("gpu major=7 util=100 bus=0:1:0.0 link=0:9:0.0", "gpu major=7 bus=0:2:0.0 link=0:9:0.0", "gpu major=7")
    box.after_reset(FREE, FREE, FREE)
    outcome = box.clear(3, {"reset": "if_alone", "wait_seconds": 0.1})
    assert outcome.enough
    assert box.resets == ["--gpu-reset -i GPU-standin-0,GPU-standin-1"]
    assert outcome.acts[-1]["gpus"] == [0, 1]


@needs_root
def test_a_gpu_is_not_reset_when_one_that_must_go_along_is_in_use(box: GpuBox, stack: ExitStack) -> None:
    user = stack.enter_context(bystander(user=NOBODY))
    box.write(
        "gpu major=7 util=100 bus=0:1:0.0 link=0:2:0.0", "gpu major=7 bus=0:2:0.0", f"process gpu=1 pid={user} used=9"
    )
    box.after_reset(FREE, FREE)
    outcome = box.clear(2, {"reset": "if_alone", "wait_seconds": 0.1})
    assert outcome.actions == ["waited", "reset-refused", "shared"]
    assert f"pid {user}" in outcome.texts
    assert box.resets == []
    assert running(user)


def test_every_kind_of_child_of_a_dead_run_is_ended_and_its_port_is_free(box: GpuBox, stack: ExitStack) -> None:
    untouched = stack.enter_context(bystander())
    left = Leftover(box.run_dir)
    stack.callback(left.end)
    assert port_in_use(left.port)
    (reaped,) = reap(box.run_dir)
    assert set(left.pids) <= set(reaped.ended)
    assert not any(map(running, left.pids))
    assert not port_in_use(left.port)
    wait_for(lambda: not Path(f"/proc/{left.defunct}").exists(), "its new parent takes the defunct child")
    assert running(untouched)


def test_a_family_is_ended_whole_and_never_ones_own(stack: ExitStack) -> None:
    untouched = stack.enter_context(bystander())
    spared = stack.enter_context(bystander())
    mine = stack.enter_context(bystander())
    assert end_family(identity_of(os.getpid()), (), 0.1) == ()
    assert end_family(identity_of(os.getppid()), (), 0.1) == ()
    assert end_family(identity_of(spared), {spared}, 0.1) == ()
    before = identity_of(mine)
    assert end_family(before._replace(start=before.start - 1), (), 0.1) == ()  # whoever had its pid before
    assert end_family(before, {spared}, 0.1) == (mine,)
    assert running(untouched)
    assert running(spared)
    assert not running(mine)


def test_a_group_that_ignores_term_is_ended(box: GpuBox, stack: ExitStack) -> None:
    left = Leftover(box.run_dir, owner_dies=False)
    stack.callback(left.end)
    ended = set(end_family(identity_of(left.member), (), 0.2))
    assert ended == {left.leader, left.member}  # its group, not the rest of the tree
    assert all(map(running, [left.holder, left.orphan, left.mother]))
