"""Which rounds' hidden states no longer match what would be extracted today."""

from collections.abc import Callable, Iterable, Iterator

from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.errors import Eagle3Error
from infra.steps.context import Round
from infra.steps.extract import generation


def stale_rounds(
    configs: Iterable[RoundConfig], settings: Settings, say: Callable[[str], None]
) -> Iterator[tuple[Round, str]]:
    """(round, what changed) for every round with stale states; each stays with the samples it has.

    A round without states (never extracted, or deleted since), or one that cannot be looked at on this machine, is
    said and passed over.
    """
    for config in configs:
        try:
            rounds = Round(config, settings).rounds
            live, samples = rounds.current("hidden"), rounds.current("samples")
            if live is None or samples is None:
                say(f"{config.name}: no hidden states yet")
                continue
            if live.key not in rounds.keys("hidden"):
                say(f"{config.name}: its hidden states were deleted; a round that needs them extracts them again")
                continue
            pinned = Round(config, settings, samples_key=samples.key)
            key, now = pinned.keys.hidden, generation(pinned)
        except Eagle3Error as error:
            say(f"{config.name}: cannot be looked at here: {error}")
            continue
        if key == live.key:
            say(f"{config.name}: generation {key} is current")
            continue
        changed = [
            f"{name} {live.made.get(name)} -> {value}" for name, value in now.items() if live.made.get(name) != value
        ]
        yield pinned, "; ".join(changed) or "another shard layout"
