"""``eagle3 gpu``: what the GPUs hold and what is wrong with them; with ``--apply``, the round's policy."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.output import Json, print_json, print_table
from deployments.cli.rounds import Set, open_round
from infra.config.settings import Settings
from infra.units import size

if TYPE_CHECKING:
    from infra.machine.gpus.verdict import Finding


def gpu(
    name: Annotated[str | None, typer.Argument(help="A round: its policy and number of GPUs. None: defaults.")] = None,
    overrides: Set = None,
    apply: Annotated[bool, typer.Option("--apply", help="Do what the policy allows, instead of showing.")] = False,
    as_json: Json = False,
) -> None:
    """Show the GPUs, who holds them, and what is wrong; exit status 1 if too few are fit for the round.

    Nothing is touched without --apply; what may be done then is the section `gpu` of the round, which by default ends
    only processes of this project whose run is dead.
    """
    from infra.config.policies import GpuConfig
    from infra.machine.gpus.policy import Clearing
    from infra.machine.gpus.readings import gpus
    from infra.round.gpus import gpus_wanted, view

    config = open_round(name, overrides) if name else None
    policy = config.gpu if config else GpuConfig()
    report, place = gpus(), view(Settings(), policy.free)
    found, acts = place.look(), []
    wanted = gpus_wanted(config) if config else len(found)
    if apply and found:
        cleared = Clearing(policy, place, wanted).run()
        found = tuple(sorted((*cleared.fit, *cleared.unfit), key=lambda finding: finding.gpu.index))
        acts = [{"action": act.action, "gpus": act.gpus, "text": act.text} for act in cleared.acts]
    fit = sum(finding.fit for finding in found)
    enough = fit >= wanted and (policy.quarantine or fit == len(found) or config is None)
    if as_json:
        facts = {"driver": report.driver, "reason": report.reason, "wanted": wanted, "enough": enough}
        print_json({**facts, "gpus": [_facts(finding) for finding in found], "acts": acts})
    else:
        _show(report.reason, found)
        for act in acts:
            print(act["text"])
    raise typer.Exit(1 if config is not None and not enough else 0)


def _facts(finding: "Finding") -> dict[str, Any]:
    card = finding.gpu
    return {
        "index": card.index,
        "uuid": card.uuid,
        "name": card.name,
        "memory_total": card.memory_total,
        "memory_used": card.memory_used,
        "utilisation": card.utilisation,
        "holders": [
            {"pid": holder.pid, "memory": holder.memory, "whose": holder.whose, "what": holder.what}
            for holder in finding.holders
        ],
        "fit": finding.fit,
        "troubles": [
            {"kind": trouble.kind, "text": trouble.text, "advice": trouble.advice} for trouble in finding.troubles
        ],
    }


def _show(reason: str, found: "tuple[Finding, ...]") -> None:
    if not found:
        print(reason or "CUDA_VISIBLE_DEVICES leaves no GPU")
        return
    rows = []
    for finding in found:
        card = finding.gpu
        total, used = card.memory_total, card.memory_used
        rows.append(
            (
                card.index,
                card.name,
                "?" if total is None or used is None else f"{size(used)} of {size(total)}",
                "?" if card.utilisation is None else f"{card.utilisation} %",
                "\n".join(f"{holder.whose}: {holder}, {_amount(holder.memory)}" for holder in finding.holders),
                "\n".join(trouble.text for trouble in finding.troubles) or "fit",
                "\n".join(dict.fromkeys(trouble.advice for trouble in finding.troubles)),
            )
        )
    print_table("GPUs", ["", "name", "memory", "busy", "who", "state", "what to do"], rows)


def _amount(memory: int | None) -> str:
    return "?" if memory is None else size(memory)
