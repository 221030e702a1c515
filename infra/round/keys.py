"""The keys of a round's steps: each is a hash of the step's own inputs and of the key before it."""

from dataclasses import dataclass, fields

from infra.config.keys import decisive, key12
from infra.config.round import ENGINES, RoundConfig

FORMAT = 1
"""Raised when the code of a step changes what it writes, so that old results are not taken for new ones."""


@dataclass(frozen=True)
class StepKeys:
    """One key a step, in the order of the lifecycle."""

    answers: str
    samples: str
    hidden: str
    draft: str
    eval: str
    published: str
    report: str

    def items(self) -> list[tuple[str, str]]:
        """(step, key) in the order of the lifecycle."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


@dataclass(frozen=True)
class Inputs:
    """What decides the keys besides the round itself."""

    target_revision: str
    prompts: str
    evaluation_prompts: str
    versions: dict[str, str]
    samples: str | None = None
    """Key of samples to stay with, whatever their own inputs are now (re-extraction)."""
    start: str | None = None
    """Hash of the draft that training starts from; None where it starts anew."""


def step_keys(config: RoundConfig, inputs: Inputs) -> StepKeys:
    """Keys of every step of a round.

    A prompt file enters by its chosen prompts (``inputs.prompts``), and the draft to start from by its contents, not by
    their names, so a moved file changes nothing.
    An engine's version enters with the hidden states, not with the answers: another version of the engine computes
    other states, but what the target said stays what the target said.
    """
    answers = key12(
        format=FORMAT,
        target=inputs.target_revision,
        prompts=inputs.prompts,
        template=config.prompts.template_args,
        longest=config.prompts.max_prompt_tokens,
        generate=config.generate,
        dtype=config.engines[config.serve_with].dtype,
    )
    samples = inputs.samples or key12(answers=answers, prepare=config.prepare)
    hidden = key12(
        samples=samples,
        target=inputs.target_revision,
        extract=config.extract,
        version=inputs.versions[config.extract.engine],
        launch=config.engines[config.extract.engine],
    )
    draft = key12(
        hidden=hidden,
        train={name: value for name, value in decisive(config.train).items() if name != "start"},
        trainer=inputs.versions["speculators"],
        **({"start": inputs.start} if inputs.start else {}),
    )
    evaluation = key12(
        draft=draft,
        prompts=inputs.evaluation_prompts,
        template_args=config.evaluate.prompts.template_args,
        longest_prompt=config.evaluate.prompts.max_prompt_tokens,
        evaluate={name: value for name, value in decisive(config.evaluate).items() if name != "prompts"},
        engine=config.serve_with,
        version=inputs.versions[config.serve_with],
        launch=config.engines[config.serve_with],
        # How it is launched decides how fast it serves.
        ladder=[rung.model_dump() for rung in config.engines[config.serve_with].ladder],
    )
    published = key12(eval=evaluation, target=config.target.name, layouts=ENGINES)
    return StepKeys(answers, samples, hidden, draft, evaluation, published, key12(published=published))
