"""Getting GPUs free for a round: what the policy allows, in its order, and no more than the round lacks."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from infra.config.policies import GpuConfig
from infra.errors import ProcessFailed
from infra.machine.gpus.holders import holders, recorded_processes
from infra.machine.gpus.readings import Gpu, gpus
from infra.machine.gpus.reset import refusal, reset, together_with
from infra.machine.gpus.verdict import Finding, judge
from infra.machine.gpus.xid import KERNEL_LOG, fatal_xids
from infra.machine.processes.ending import end_family
from infra.machine.processes.namespaces import whole_table_visible
from infra.machine.processes.records import Reaped, reap
from infra.units import size

log = logging.getLogger(__name__)

Action = Literal["ended", "not-ended", "waited", "reset", "reset-failed", "reset-refused", "quarantined", "shared"]

POLL_SECONDS = 0.5
PROGRESS_SECONDS = 10.0
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Act:
    """One thing that was done, or decided; a line of the report."""

    action: Action
    gpus: tuple[int, ...]
    """NVML's numbers."""
    text: str


@dataclass(frozen=True)
class Cleared:
    """How it ended."""

    fit: tuple[Finding, ...]
    """GPUs that the round can use: those that are free first, then those that it shares."""
    unfit: tuple[Finding, ...]
    enough: bool
    """Whether the round can go on with ``fit``."""
    acts: tuple[Act, ...]


@dataclass(frozen=True)
class View:
    """From where this machine's GPUs are looked at.

    Args:
        run_dir: folder of this project's pid files.
        allowed: numbers of the GPUs that this process may use; None for all.
        alone: nothing outside this container uses its GPUs (``EAGLE3_GPUS_ALONE``).
        share: part of a GPU's memory that must be free.
        whole: every process of this machine can be seen, so that the driver's pids are those of this process.
        kernel_log: where the driver's Xids are.
    """

    run_dir: Path
    allowed: frozenset[int] | None = None
    alone: bool = False
    share: float = 0.9
    whole: bool = field(default_factory=whole_table_visible)
    kernel_log: Path = KERNEL_LOG

    @property
    def all_visible(self) -> bool:
        """Whether a process that cannot be seen is none."""
        return self.alone or self.whole

    def look(self, resets: Mapping[int, float] | None = None) -> tuple[Finding, ...]:
        """Every GPU as it is now.

        Args:
            resets: when GPUs were reset, ``time.monotonic()`` by number: their Xids from before are over.
        """
        records, resets = recorded_processes(self.run_dir), resets or {}
        now, xids = time.monotonic(), fatal_xids(self.kernel_log)
        findings = []
        for gpu in gpus().gpus:
            if self.allowed is None or gpu.index in self.allowed:
                since_reset = now - resets.get(gpu.index, -math.inf)
                recent = [xid for xid in xids if xid.age < since_reset]
                findings.append(judge(gpu, holders(gpu, records), self.share, recent, self.all_visible))
        return tuple(findings)


@dataclass
class Clearing:
    """One attempt to get ``count`` GPUs free.

    Each step is taken only while GPUs are lacking, but for ending this project's own leftovers.
    """

    policy: GpuConfig
    view: View
    count: int
    acts: list[Act] = field(default_factory=list)
    _resets: dict[int, float] = field(default_factory=dict)
    _in_vain: set[int] = field(default_factory=set)
    """GPUs that were waited for already, without anything having been ended there since."""

    def run(self) -> Cleared:
        """End, wait, reset and leave out, in this order, as far as the policy allows."""
        findings = self._look()
        for step in (self._end_leftovers, self._end_same_user, self._wait, self._reset):
            if step != self._end_leftovers and self._enough(findings):
                break
            findings = step(findings)
        return self._decide(findings)

    def _look(self) -> tuple[Finding, ...]:
        return self.view.look(self._resets)

    def _enough(self, findings: Sequence[Finding]) -> bool:
        fit = sum(finding.fit for finding in findings)
        return fit >= self.count and (self.policy.quarantine or fit == len(findings))

    def _act(self, action: Action, findings: Sequence[Finding], text: str) -> None:
        self.acts.append(Act(action, tuple(finding.gpu.index for finding in findings), text))
        log.info(text)

    def _end_leftovers(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        if not self.policy.end_own:
            return findings
        try:
            ended = [reaped for reaped in reap(self.view.run_dir) if reaped.ended]
        except ProcessFailed as error:
            self._act("not-ended", [], str(error))  # what it holds counts against the GPU
            return self._settle(ended=False)
        for reaped in ended:
            where = [finding for finding in findings if _holds(finding, reaped)]
            self._act("ended", where, f"ended {reaped.record.purpose}, left by a dead run{_on(where)}")
        return self._settle(ended=True) if ended else findings

    def _end_same_user(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        if not self.policy.end_same_user:
            return findings
        if not self.view.whole:
            # In a container the driver's pids are those of the machine: here they are other processes', or nobody's.
            if held := [finding for finding in findings if finding.needs("end")]:
                why = "which processes these are cannot be told from a container"
                self._act("not-ended", held, f"ended nobody on {_names(held)}: {why}")
            return findings
        spared = recorded_processes(self.view.run_dir).keys()
        acted: set[int] = set()
        for finding in findings:
            if self.policy.quarantine and len(acted) + sum(item.fit for item in findings) >= self.count:
                break  # more than the round lacks is not ended
            # All or nothing: a GPU that others hold too would not become free.
            if not finding.needs("end") or any(holder.whose != "same user" for holder in finding.living):
                continue
            for holder in finding.living:
                if ended := end_family(holder.identity, spared, GRACE_SECONDS):
                    acted.add(finding.gpu.index)
                    text = f"ended {holder} and its process group (pids {', '.join(map(str, ended))})"
                    self._act("ended", [finding], text + _on([finding]))
        return self._settle(ended=True) if acted else findings

    def _settle(self, *, ended: bool) -> tuple[Finding, ...]:
        """After processes were asked to end: the driver takes a while to give their memory back."""
        if ended:
            self._in_vain.clear()
        return self._wait(self._look())

    def _wait(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """Wait for memory and work that nobody owns to go, until the round has enough GPUs."""
        pending = self._waiting(findings)
        if not pending or self._enough(findings):
            return findings
        begin = shown = time.monotonic()
        log.info(f"waiting for {'; '.join(map(str, pending))}")
        while not self._enough(findings) and self._waiting(findings):
            now = time.monotonic()
            if now - begin >= self.policy.wait_seconds:
                break
            if now - shown >= PROGRESS_SECONDS:
                shown = now
                log.info(f"still waiting after {now - begin:.0f} s: {'; '.join(map(str, self._waiting(findings)))}")
            time.sleep(POLL_SECONDS)
            findings = self._look()
        seconds = time.monotonic() - begin
        left = self._waiting(findings)
        numbers = {finding.gpu.index for finding in pending}
        freed = [finding for finding in findings if finding.fit and finding.gpu.index in numbers]
        if freed:
            self._act("waited", freed, f"waited {seconds:.0f} s until {_names(freed)} had really become free")
        if left and not self._enough(findings):
            self._act("waited", left, f"waited {seconds:.0f} s in vain: {'; '.join(map(str, left))}")
            self._in_vain |= {finding.gpu.index for finding in left}
        return findings

    def _waiting(self, findings: Sequence[Finding]) -> list[Finding]:
        return [item for item in findings if item.needs("wait") and item.gpu.index not in self._in_vain]

    def _reset(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        if self.policy.reset == "never":
            return findings
        by_number = {finding.gpu.index: finding for finding in findings}
        done: set[int] = set()
        for finding in findings:
            if finding.gpu.index in done or not _reset_helps(finding):
                continue
            if done and self._enough(self._look()):
                break  # nor is more reset
            group = [by_number[gpu.index] for gpu in together_with(finding.gpu, _others(finding, findings))]
            done |= {item.gpu.index for item in group}
            self._reset_group(group)
        return self._look()

    def _reset_group(self, group: Sequence[Finding]) -> None:
        now = {finding.gpu.index: finding for finding in self._look()}
        living = [holder for finding in group for holder in now[finding.gpu.index].living]
        why_not = refusal([finding.gpu for finding in group])
        if living:
            why_not = f"it is in use by {', '.join(map(str, living))}"
        elif not self.view.all_visible:
            why_not = "processes outside this container may use it"
        if why_not:
            self._act("reset-refused", group, f"did not reset {_names(group)}: {why_not}")
            return
        log.info(f"resetting {_names(group)}")
        begin = time.monotonic()
        if said := reset([finding.gpu for finding in group]):
            self._act("reset-failed", group, f"the reset of {_names(group)} failed: {said}")
            return
        numbers = {finding.gpu.index for finding in group}
        self._resets |= dict.fromkeys(numbers, begin)
        begin = time.monotonic()
        while bad := [item for item in self._look() if item.gpu.index in numbers and not item.fit]:
            if time.monotonic() - begin >= self.policy.wait_seconds:
                self._act("reset-failed", bad, f"the reset did not help: {'; '.join(map(str, bad))}")
                return
            time.sleep(POLL_SECONDS)
        self._act("reset", group, f"reset {_names(group)}")

    def _decide(self, findings: tuple[Finding, ...]) -> Cleared:
        fit = sorted((item for item in findings if item.fit), key=lambda item: (bool(item.living), item.gpu.index))
        unfit = [item for item in findings if not item.fit]
        enough = self._enough(findings)
        for item in fit[: self.count]:
            if item.living:
                who = ", ".join(map(str, item.living))
                self._act("shared", [item], f"GPU {item.gpu.index} is shared with {who}: enough of it is free")
        if enough:
            for item in unfit:
                self._act("quarantined", [item], f"goes on without {item}")
        return Cleared(tuple(fit), tuple(unfit), enough, tuple(self.acts))


def _holds(finding: Finding, reaped: Reaped) -> bool:
    return any(holder.pid in reaped.ended for holder in finding.holders)


def _reset_helps(finding: Finding) -> bool:
    return bool(finding.troubles) and all(trouble.remedy in ("wait", "reset") for trouble in finding.troubles)


def _others(finding: Finding, findings: Sequence[Finding]) -> list[Gpu]:
    return [item.gpu for item in findings if item.gpu.index != finding.gpu.index]


def _names(findings: Sequence[Finding]) -> str:
    return ", ".join(f"GPU {finding.gpu.index}" for finding in findings)


def _on(findings: Sequence[Finding]) -> str:
    held = [
        f"{size(sum(holder.memory or 0 for holder in finding.holders))} on GPU {finding.gpu.index}"
        for finding in findings
    ]
    return f" ({', '.join(held)})" if held else ""
