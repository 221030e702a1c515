"""Whether a round's hidden states no longer match what would be extracted today."""

from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.round.context import Round
from infra.round.states import generation


def stale(config: RoundConfig, settings: Settings) -> tuple[Round | None, str]:
    """The round with the samples it has, and what changed, if its states are stale; else None, and why not.

    Raises:
        Eagle3Error: it cannot be looked at on this machine (no target, no engine, a damaged pointer).
    """
    rounds = Round(config, settings).rounds
    live, samples = rounds.current("hidden"), rounds.current("samples")
    if live is None or samples is None:
        return None, "no hidden states yet"
    if live.key not in rounds.keys("hidden"):
        return None, "its hidden states were deleted; a round that needs them extracts them again"
    pinned = Round(config, settings, samples_key=samples.key)
    key, now = pinned.keys.hidden, generation(pinned)
    if key == live.key:
        return None, f"generation {key} is current"
    changed = [
        f"{name} {live.made.get(name)} -> {value}" for name, value in now.items() if live.made.get(name) != value
    ]
    return pinned, "; ".join(changed) or "another shard layout"
