"""What is wrong with a GPU, and what could mend it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infra.machine.gpus.holders import Holder
from infra.machine.gpus.readings import Gpu
from infra.machine.gpus.xid import FATAL, Xid
from infra.units import size

Kind = Literal["lost", "unread", "mig", "broken", "unfreed", "wedged", "held", "short"]
Remedy = Literal["none", "wait", "end", "reset"]

STRAY_BYTES = 1 << 30
"""Memory without a process up to which a GPU counts as free: the driver's own contexts, a screen."""
BUSY_PER_CENT = 99
"""From here on a GPU counts as fully busy."""


@dataclass(frozen=True)
class Trouble:
    """One thing that keeps a round from a GPU."""

    kind: Kind
    text: str
    """A clause for people, without the GPU's number."""
    remedy: Remedy
    """The least that can help: nothing here, time, the end of a process, a reset."""
    advice: str
    """What a person can do."""


@dataclass(frozen=True)
class Finding:
    """A GPU, who is on it, and what is wrong."""

    gpu: Gpu
    holders: tuple[Holder, ...]
    troubles: tuple[Trouble, ...]

    @property
    def fit(self) -> bool:
        """Whether a round can use it now."""
        return not self.troubles

    @property
    def living(self) -> tuple[Holder, ...]:
        """Processes on it that run."""
        return tuple(holder for holder in self.holders if holder.lives)

    def needs(self, remedy: Remedy) -> bool:
        """Whether some trouble has this remedy."""
        return any(trouble.remedy == remedy for trouble in self.troubles)

    def __str__(self) -> str:
        return f"GPU {self.gpu.index}: " + ("; ".join(trouble.text for trouble in self.troubles) or "fit")


def judge(gpu: Gpu, holders: tuple[Holder, ...], share: float, xids: Sequence[Xid], all_visible: bool) -> Finding:
    """What keeps a round from this GPU.

    Args:
        holders: who is on it.
        share: part of its memory that must be free.
        xids: recent fatal Xids of this machine.
        all_visible: whether every process of the machine can be seen; if not, a process that cannot be seen may live.
    """
    if gpu.lost:
        told = "; ".join(gpu.faults)
        lost = Trouble(
            "lost", f"lost ({told})", "none", "restart the machine; if it comes back lost, the card is broken"
        )
        return Finding(gpu, holders, (lost,))
    broken = _broken(gpu, xids)
    if gpu.mig:
        advice = "give one of its instances in CUDA_VISIBLE_DEVICES (MIG-...), or turn MIG off with `nvidia-smi -mig 0`"
        return Finding(gpu, holders, (*broken, Trouble("mig", "split into MIG instances", "none", advice)))
    if gpu.memory_total is None or gpu.memory_used is None or gpu.utilisation is None:
        if broken:
            return Finding(gpu, holders, broken)
        told = "; ".join(gpu.faults) or "the driver does not tell its memory"
        unread = Trouble("unread", told, "none", "see `nvidia-smi -q` and `dmesg`")
        return Finding(gpu, holders, (unread,))
    return Finding(gpu, holders, (*broken, *_occupied(gpu, holders, share, all_visible)))


def _broken(gpu: Gpu, xids: Sequence[Xid]) -> tuple[Trouble, ...]:
    health = gpu.health
    signs = {
        f"{health.uncorrected} uncorrected memory errors": health.uncorrected > 0,
        "memory pages wait to be retired": health.pages_pending,
        "memory rows wait to be remapped": health.rows_pending,
        "the driver wants it reset": health.reset_required,
        f"the driver wants a {health.recovery}": bool(health.recovery),
    }
    texts = [text for text, present in signs.items() if present]
    texts += [f"Xid {xid.code} {xid.age / 60:.0f} min ago: {FATAL[xid.code]}" for xid in xids if xid.concerns(gpu.bus)]
    if health.rows_failed:
        texts.insert(0, "a memory row could not be remapped")
        return (Trouble("broken", ", ".join(texts), "none", "replace the card"),)
    if not texts:
        return ()
    if health.recovery == "restart of the machine":
        return (Trouble("broken", ", ".join(texts), "none", "restart the machine"),)
    return (Trouble("broken", ", ".join(texts), "reset", "reset it, as root: `nvidia-smi --gpu-reset -i N`"),)


def _occupied(gpu: Gpu, holders: tuple[Holder, ...], share: float, all_visible: bool) -> tuple[Trouble, ...]:
    """Memory and time of the GPU that somebody, or nobody, takes."""
    assert gpu.memory_total is not None
    assert gpu.memory_used is not None
    assert gpu.utilisation is not None
    living = [holder for holder in holders if holder.lives]
    nobody = "no living process" if all_visible else "no process that can be seen from here (a container's view)"
    advice = "wait, or reset it, as root: `nvidia-smi --gpu-reset -i N`"
    if not all_visible:
        advice = "look from outside the container; if nothing else uses it, set EAGLE3_GPUS_ALONE=true"
    found = []
    stray = _stray(gpu.memory_used, holders)
    if stray > STRAY_BYTES:
        gone = [str(holder) for holder in holders if not holder.lives]
        by = f" (it was {', '.join(gone)})" if gone else ""
        found.append(Trouble("unfreed", f"{size(stray)} held by {nobody}{by}", "wait", advice))
    if gpu.utilisation >= BUSY_PER_CENT and not living:
        found.append(Trouble("wedged", f"{gpu.utilisation} % busy with {nobody}", "wait", advice))
    free, wanted = gpu.memory_total - gpu.memory_used, share * gpu.memory_total
    room = f"{size(free)} free of the {size(wanted)} wanted"
    if living and free + max(stray, 0) < wanted:
        who = ", ".join(map(str, living))
        found.append(Trouble("held", f"{room}, in use by {who}", "end", "wait for them, or end them"))
    elif free < wanted and not found:
        found.append(Trouble("short", room, "none", "lower gpu.free, if the engine's flags ask for less"))
    return tuple(found)


def _stray(used: int, holders: tuple[Holder, ...]) -> int:
    """Bytes in use that no living process accounts for; 0 when the driver does not tell how much the living hold."""
    living = [holder.memory for holder in holders if holder.lives]
    known = [memory for memory in living if memory is not None]
    return used - sum(known) if len(known) == len(living) else 0
