"""What a target's own files recommend of sampling, beside what the round does."""

from infra.config.round import GenerateConfig
from infra.config.sampling import sampling_words
from infra.errors import MissingTarget
from infra.round.context import RoundContext
from infra.targets.target import recommended_sampling


def answering_words(config: GenerateConfig) -> str:
    """How the target answers the prompts of a round, and how often."""
    words = sampling_words(config)
    if config.further_temperatures:
        further = ", ".join(f"{value:g}" for value in config.further_temperatures)
        words += f"; each prompt once more at the temperatures {further}"
    return words


def sampling_notes(context: RoundContext) -> list[str]:
    """What the target's own files recommend of sampling and this round does not do; nothing while it is not here."""
    config = context.config
    try:
        recommended = recommended_sampling(context.target.path)
    except MissingTarget:
        return []
    notes = []
    for section, said in (("generate", config.generate), ("evaluate", config.evaluate)):
        if section == "generate" and config.generate.answers == "given":
            continue
        others = {name: value for name, value in recommended.items() if value != getattr(said, name)}
        if isinstance(said, GenerateConfig) and others.get("temperature") in said.further_temperatures:
            del others["temperature"]
        if others:
            words = answering_words(said) if isinstance(said, GenerateConfig) else sampling_words(said)
            named = ", ".join(f"{name} {value:g}" for name, value in others.items())
            notes.append(
                f"{config.target.name}'s generation_config.json recommends {named}, which {section} does not use "
                f"({words}); name the values there if you serve with them"
            )
    return notes
