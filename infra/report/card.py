"""The model card (README.md) that is published beside a draft. It names no path of the machine that made it."""

import re

import yaml

from infra.engines.registry import as_trained, find_engine
from infra.errors import ConfigError
from infra.report.markdown import acceptance_table, speed_table, verdict
from infra.report.wording import cell, percent, table
from infra.results import Report

LOCAL_PATH = re.compile(r"file://\S*|(?<![\w.:/<])~?/[\w.-]+[\w./-]*")
"""An absolute path or one below a home folder."""


def cards(result: Report, source: str = "") -> dict[str, str]:
    """The card of each published layout, by engine; raises as :func:`card`."""
    return {layout.engine: card(result, layout.engine, source) for layout in result.layouts if layout.published}


def card(result: Report, engine: str, source: str = "") -> str:
    """The card of a draft in one engine's layout.

    Args:
        result: the finished round.
        engine: the engine that loads the layout.
        source: where the target comes from, as in the round's ``target.source``.

    Raises:
        ConfigError: a text of the round would put a path of this machine into the card.
    """
    base = base_model(result.target, source)
    blocks = [
        f"---\n{_front_matter(base, engine)}---",
        f"# {result.draft}",
        f"An EAGLE-3 draft model for **{base}**: a small model that proposes tokens, which the target checks in one "
        "step, so that one step yields several tokens. The target's answers stay its own.",
        "## Serve it",
        f"Put this folder beside the target and start {find_engine(engine).title} with both:",
        f"```sh\n{find_engine(engine).serve_command(base, result.draft, result.evaluation.drafts)}\n```",
        f"Here `{result.draft}` is this folder. The figures below were taken with "
        f"{result.evaluation.engine} {result.evaluation.engine_version}.",
        _layouts(result, engine),
        "## What to expect",
        verdict(result),
        table(acceptance_table(result)),
        "Acceptance length counts the target's own token: 1.0 is no speculation. In brackets: 95 % bootstrap interval "
        "over prompts.",
        table(speed_table(result)),
        "TTFT is the time to the first token, ITL the time between tokens: median / 95th percentile. "
        "Speed depends on the machine; measure on yours.",
        "## How it was made",
        _training(result),
        table(_provenance(result, base, engine)),
        "## Limitations",
        _limitations(result),
    ]
    text = "\n\n".join(block for block in blocks if block) + "\n"
    found = LOCAL_PATH.search(text)
    if found:
        raise ConfigError(
            f"the model card of {result.draft} would name {found.group()!r}, a path of this machine",
            expected="texts that mean something elsewhere too",
            fix="take the path out of the round's names and versions",
        )
    return text


def base_model(target: str, source: str) -> str:
    """The target's public name: ``org/model`` of an ``hf://`` source, else the target's own name."""
    if source.startswith("hf://"):
        return source.removeprefix("hf://").split("@")[0]
    return target


def _layouts(result: Report, engine: str) -> str:
    """Which engine versions the folder is for, and what there is for the other engine."""
    sentences = []
    for layout in result.layouts:
        title = find_engine(layout.engine).title
        if layout.engine != engine:
            where = f"in the folder `{layout.engine}` beside this one" if layout.published else "not published: "
            sentences.append(f"The draft in {title}'s layout is {where}{layout.why_not.rstrip('.')}.")
        elif layout.made_for:
            ids, taps = (", ".join(map(str, numbers)) for numbers in (layout.layer_ids, result.taps))
            sentences.append(
                f"The layer ids {ids} in its `config.json` were made for {title} {layout.made_for} and mean "
                f"taps {taps} in {layout.holds_for}; a version that numbers layers otherwise would feed the draft "
                "others."
            )
    return " ".join(sentences)


def _front_matter(base: str, engine: str) -> str:
    fields = {
        "base_model": base,
        "library_name": find_engine(engine).library,
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "speculative-decoding", "speculators", engine],
    }
    return yaml.safe_dump(fields, sort_keys=False)


def _training(result: Report) -> str:
    training = result.training
    data = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in result.counts.items())
    text = (
        f"Trained on hidden states of the target for {training.steps:,} steps ({training.epochs} epochs, "
        f"{training.tokens:,} tokens) with speculators {training.trainer_version}. Data: {data or 'not counted'}."
    )
    if training.start:
        text += f" It started from the draft {training.start}."
    if training.validation:
        joint = " / ".join(percent(share) for share in training.validation[-1].accuracy)
        text += f" Joint accuracy on held-out samples, averaged over positions, at draft steps 0, 1, ...: {joint}."
    return text


def _provenance(result: Report, base: str, engine: str) -> list[dict[str, str]]:
    plain = " and ".join(f"{find_engine(name).title}'s" for name in as_trained())
    label = "sha256 of" if engine in as_trained() else f"made from {plain} layout, sha256 of"
    facts = {
        "target": f"{base}, revision {result.target_revision} (hash of config, tokenizer, template and weight headers)",
        "taps": f"{', '.join(map(str, result.taps))} (tap k: the residual stream that enters decoder layer k, from 0)",
        "states from": f"{result.engine} {result.engine_version}",
        **result.sampling,
        "draft vocabulary": f"{result.training.draft_vocab_size:,} tokens",
        **result.versions,
        **{f"{label} {name}": digest for name, digest in sorted(result.training.files.items())},
    }
    return [{"what": name, "value": cell(value)} for name, value in facts.items()]


def _limitations(result: Report) -> str:
    points = [
        f"It fits this target only, at revision {result.target_revision}. Other fine-tunes of it accept less.",
        "It was trained and measured on prompts and lengths like those counted above. Other languages and tasks and "
        "longer contexts can be accepted much less; measure before relying on it.",
        f"It can propose {result.training.draft_vocab_size:,} of the target's tokens; others end a chain of drafts.",
        "Whether it makes serving faster depends on machine, engine and load: see the speed table.",
        "The licence and terms of the target apply to what is derived from it.",
    ]
    return "\n".join(f"- {point}" for point in points)
