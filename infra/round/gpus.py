"""GPUs for a round: how many it wants, getting them free by its policy, and which ones its processes then see."""

import os
from typing import TYPE_CHECKING

from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.errors import PreflightError
from infra.machine.gpus.choice import VISIBLE, allowed_gpus, cuda_names
from infra.machine.gpus.policy import Cleared, Clearing, View
from infra.machine.gpus.readings import gpus

if TYPE_CHECKING:
    from infra.round.context import RoundContext


def gpus_wanted(config: RoundConfig) -> int:
    """GPUs that the round uses at once, at most; 0 for a round on the CPU."""
    used = [config.engines[name] for name in config.used_engines]
    wanted = [engine.tensor_parallel for engine in used if engine.device == "cuda"]
    if config.engines[config.extract.engine].device == "cuda":
        wanted.append(config.train.devices)
    return max(wanted, default=0)


def split_by_hand() -> bool:
    """Whether CUDA_VISIBLE_DEVICES names MIG instances: which they are was decided by a person, and it stays so."""
    return "MIG-" in os.environ.get(VISIBLE, "")


def view(settings: Settings, share: float) -> View:
    """This machine's GPUs as far as this process may use them.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names what is no GPU of this machine.
    """
    allowed = allowed_gpus(os.environ, gpus().gpus)
    return View(settings.run_dir, allowed, settings.gpus_alone, share)


def clear_gpus(config: RoundConfig, settings: Settings) -> Cleared:
    """Get as many GPUs free as the round wants, by its policy; that a slot was given is no proof that they are."""
    return Clearing(config.gpu, view(settings, config.gpu.free), gpus_wanted(config)).run()


def use_gpus(context: "RoundContext", cleared: Cleared) -> None:
    """Make the round's processes use the GPUs that are fit.

    Raises:
        PreflightError: they are too few.
    """
    if not cleared.enough:
        raise too_few(context.config, cleared)
    chosen = [finding.gpu for finding in cleared.fit]
    machine = gpus().gpus
    natural = [gpu.index for gpu in chosen] == sorted(gpu.index for gpu in chosen)
    context.devices = () if natural and not cleared.unfit else cuda_names(chosen, machine)


def too_few(config: RoundConfig, cleared: Cleared) -> PreflightError:
    """The sentence that stops the round."""
    wanted, seen = gpus_wanted(config), len(cleared.fit) + len(cleared.unfit)
    what = f"round {config.name} wants {wanted} GPUs and {len(cleared.fit)} of {seen} are fit"
    if cleared.unfit:
        what += " (" + "; ".join(map(str, cleared.unfit)) + ")"
    advice = dict.fromkeys(trouble.advice for finding in cleared.unfit for trouble in finding.troubles)
    return PreflightError(
        what,
        expected="that many to be fit" if config.gpu.quarantine else "all of them to be fit (gpu.quarantine is false)",
        fix="; ".join(advice) or "see `eagle3 gpu`",
    )
