"""What stops a round that can be known before anything is made: from its config, its target and the versions alone.

One function a check: it yields a sentence for each thing that cannot be, or nothing. A new one goes into
:data:`CHECKS`. ``eagle3 plan``, ``eagle3 doctor ROUND`` and preflight ask all of them; what a check calls is what the
late places call, so that they agree. A target that is not here yet is judged by ``target.shape``, and in full when it
is fetched. What the *machine* lacks is in :mod:`infra.round.preflight`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from infra.config.round import EngineName, RoundConfig, TargetShape
from infra.config.settings import Settings
from infra.drafter.job import TrainJob, draft_shape
from infra.drafter.opening import planned_draft
from infra.drafter.start import start_faults
from infra.drafter.trainer import check_devices
from infra.engines.engine import Use
from infra.engines.limits import beyond
from infra.engines.registry import as_trained, find_engine, planned_version
from infra.errors import ConfigError, Eagle3Error, EngineError, MissingDraft, MissingTarget, TrainingError
from infra.round.start import find_start, to_be_fetched
from infra.store.objects import ObjectStore
from infra.targets.final_norm import check_final_norm, read_final_norm
from infra.targets.target import Target, open_target, read_json
from infra.targets.text import open_text
from infra.targets.weights import EMBEDDING, HEAD, NORM, find_stored, stored_fault


@dataclass(frozen=True)
class Asked:
    """A round as the checks see it.

    Args:
        config: the round.
        settings: the machine's, for where things lie.
        shape: the target's shape, its own or the round's word for it.
        target: the target; None while it is not here.
        serves: whether a draft is trained and served; False where hidden states are all that is wanted.
    """

    config: RoundConfig
    settings: Settings
    shape: TargetShape
    target: Target | None
    serves: bool = True

    def version(self, engine: EngineName) -> str:
        """The engine's version, installed or to be installed.

        Raises:
            EngineError: it is none that this project knows.
        """
        return planned_version(engine, self.config.engines[engine].device, self.settings)

    @cached_property
    def draft(self) -> Mapping[str, Any] | Eagle3Error:
        """config.json of the draft that would be trained, or why the trainer would not.

        Of a target that is not here only what the round itself says.
        """
        if self.target is None:
            return draft_by_round(self.config)
        job = TrainJob(
            config=self.config.train,
            target=self.target,
            device=self.config.engines[self.config.extract.engine].device,
            taps=self.config.extract.taps,
            states_url=self.settings.store,
            states_prefix="rounds",
            draft_vocab_size=self.config.prepare.draft_vocab_size,
            workdir=self.settings.scratch_dir / f"opening-{os.getpid()}",
        )
        try:
            return planned_draft(job, self.settings.run_dir, self.settings.cache_dir / "openings")
        except (ConfigError, TrainingError) as error:
            return error


def draft_by_round(config: RoundConfig, target: Target | None = None) -> Mapping[str, Any]:
    """What round and target alone say of the draft's config.json; its rotary settings are the target's."""
    said = {"norm_before_fc": config.train.norm_before_fc, "norm_output": config.train.norm_output}
    try:
        rope = getattr(open_text(target.path), "rope_parameters", None) if target is not None else None
    except ConfigError:
        rope = None
    return said | ({"transformer_layer_config": {"rope_parameters": rope}} if rope else {})


def versions_are_known(asked: Asked) -> Iterator[str]:
    """Flags, pages and layer ids of the engines were read for some versions only."""
    for engine in asked.config.used_engines:
        try:
            asked.version(engine)
        except EngineError as error:
            yield str(error)


def engines_can(asked: Asked) -> Iterator[str]:
    """Every limit of the engines (:mod:`infra.engines.limits`); the parity gate captures with the serving one, too."""
    config = asked.config
    for engine in config.used_engines:
        try:
            version = asked.version(engine)
        except EngineError:
            continue
        yield from beyond(
            Use(
                engine=find_engine(engine),
                version=version,
                config=config.engines[engine],
                name=config.target.name,
                shape=asked.shape,
                target=asked.target,
                taps=config.extract.taps,
                captures=True,
                drafts=asked.serves and engine == config.serve_with,
            )
        )


def final_norm_is_known(asked: Asked) -> Iterator[str]:
    """The capture gate, and an engine that gives the final state after it, need the target's final norm."""
    try:
        if asked.target is None:
            check_final_norm(asked.config.target.name, asked.shape.family)
        else:
            read_final_norm(asked.target)
    except ConfigError as error:
        yield str(error)


def outer_tensors_are_plain(asked: Asked) -> Iterator[str]:
    """The trainer and the gates read embedding, final norm and head from the target's files."""
    if asked.target is None:
        return
    wide, whole = asked.shape.hidden_size, asked.shape.vocab_size
    for names, shape in ((EMBEDDING, (whole, wide)), (NORM, (wide,)), (HEAD, (whole, wide))):
        try:
            if fault := stored_fault(find_stored(asked.target.path, names), shape):
                yield f"target {asked.config.target.name} cannot be trained for: {fault}"
        except ConfigError as error:
            yield str(error)


def head_is_stored_or_tied(asked: Asked) -> Iterator[str]:
    """Without a head of its own a target's embedding is taken for it, which is wrong unless config.json says so."""
    if asked.target is None:
        return
    name, said = asked.config.target.name, read_json(asked.target.path / "config.json")
    with suppress(ConfigError):  # other checks say so
        tied = said.get("tie_word_embeddings") or getattr(open_text(asked.target.path), "tie_word_embeddings", False)
        if not tied and find_stored(asked.target.path, HEAD).name in EMBEDDING:
            yield (
                f"target {name} has no lm_head.weight in plain numbers, and its config.json does not say that its head "
                "is its embedding (tie_word_embeddings). To mend it: use a target whose head is not quantised"
            )


def draft_vocabulary_fits(asked: Asked) -> Iterator[str]:
    """A draft proposes tokens of its target."""
    size, whole = asked.config.prepare.draft_vocab_size, asked.shape.vocab_size
    if asked.serves and size is not None and size > whole:
        yield (
            f"prepare.draft_vocab_size is {size}, and {asked.config.target.name} has {whole} tokens. To mend it: lower "
            "it, or leave it out for all of them"
        )


def training_devices_can(asked: Asked) -> Iterator[str]:
    """Where the trainer runs."""
    if not asked.serves:
        return
    try:
        check_devices(asked.config.train, asked.config.engines[asked.config.extract.engine].device)
    except TrainingError as error:
        yield str(error)


def trainer_opens_target(asked: Asked) -> Iterator[str]:
    """The real trainer opens the target's config and reads ``train.extra_args``; no weights are read."""
    if asked.serves and isinstance(asked.draft, Eagle3Error):
        yield str(asked.draft)


def draft_to_start_from_fits(asked: Asked) -> Iterator[str]:
    """A draft to start from is such a draft as this round makes, of this target; a hub's is judged when it is here."""
    said = asked.config.train.start
    if not asked.serves or not said or to_be_fetched(said, asked.settings):
        return
    config, planned = asked.config, {} if isinstance(asked.draft, Eagle3Error) else asked.draft
    try:
        start = find_start(said, asked.settings, ObjectStore(asked.settings.store))
    except MissingDraft as error:
        yield str(error)
        return
    if start is not None:
        shape = draft_shape(config.train, config.extract.taps, config.prepare.draft_vocab_size, asked.shape)
        yield from start_faults(start, shape, planned, asked.target)


def engine_reads_draft(asked: Asked) -> Iterator[str]:
    """An engine that does not load the draft as the trainer writes it has a layout that cannot express everything."""
    layout = find_engine(asked.config.serve_with).layout
    if not asked.serves or layout is None or isinstance(asked.draft, Eagle3Error):
        return
    with suppress(EngineError):  # other checks say so
        if reason := layout.inexpressible(asked.draft, asked.version(asked.config.serve_with)):
            others = " or ".join(as_trained())
            yield f"{reason}. To mend it: set serve_with: {others}, train without it, or install another version"


def draft_heads_divide(asked: Asked) -> Iterator[str]:
    """The draft is split over as many GPUs as its target."""
    if not asked.serves or isinstance(asked.draft, Eagle3Error):
        return
    engine = asked.config.serve_with
    heads = asked.draft.get("transformer_layer_config", {}).get("num_attention_heads")
    if heads and heads % (parts := asked.config.engines[engine].tensor_parallel):
        yield (
            f"{engine} cannot split the draft's {heads} attention heads over {parts} GPUs. To mend it: set "
            f"engines.{engine}.tensor_parallel to a divisor of {heads}"
        )


CHECKS: tuple[Callable[[Asked], Iterable[str]], ...] = (
    versions_are_known,
    engines_can,
    final_norm_is_known,
    outer_tensors_are_plain,
    head_is_stored_or_tied,
    draft_vocabulary_fits,
    training_devices_can,
    trainer_opens_target,
    draft_to_start_from_fits,
    engine_reads_draft,
    draft_heads_divide,
)


def ask(config: RoundConfig, settings: Settings, serves: bool = True) -> Asked | None:
    """The round as the checks see it; None when nothing is known of its target.

    Raises:
        ConfigError: the target's config.json cannot be used.
    """
    try:
        target = open_target(config.target, settings.models_dir)
    except MissingTarget:
        shape = config.target.shape
        return Asked(config, settings, shape, None, serves) if shape is not None else None
    return Asked(config, settings, target.shape, target, serves)


def refusals(config: RoundConfig, settings: Settings, serves: bool = True) -> list[str]:
    """Why the round cannot end, every reason once, as far as config, target and versions tell; empty when it can.

    Args:
        serves: whether a draft is trained and served; False where hidden states are all that is wanted.
    """
    try:
        asked = ask(config, settings, serves)
    except ConfigError as error:
        return [str(error)]
    return list(dict.fromkeys(said for check in CHECKS for said in check(asked))) if asked is not None else []
