"""What every step of a round needs at hand."""

import importlib.metadata
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Literal

from infra.config.round import EngineConfig, PromptsConfig, RoundConfig
from infra.config.settings import Settings
from infra.data.history import History
from infra.data.places import hides_a_question
from infra.data.prompts import BUILTIN, Prompt, Refusal, load_prompts, next_prompt, prompts_digest
from infra.data.tally import Tally
from infra.data.template import Chat
from infra.disk.guard import DiskGuard
from infra.drafter.start import Start
from infra.engines.registry import engine_version
from infra.environments.building import environment_python
from infra.errors import ConfigError, EnvironmentBuildError, MissingTarget
from infra.machine.locks import round_lock
from infra.round.keys import Inputs, StepKeys, step_keys
from infra.round.start import find_start
from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore
from infra.store.samples import Samples
from infra.targets.target import Target, open_target


class RoundContext:
    """A round on this machine: config, target, prompts, store and the keys of its steps.

    Everything but the config and the settings is read when it is first asked for. A plain class, not a dataclass:
    Prefect walks through the fields of dataclasses that are handed to tasks, and token ids are many.
    """

    def __init__(self, config: RoundConfig, settings: Settings, samples_key: str | None = None) -> None:
        """A round; ``samples_key`` makes it stay with samples that exist, whatever their inputs are now."""
        self.config = config
        self.settings = settings
        self._samples_key = samples_key
        self._choices: dict[tuple[str, bool], tuple[list[Prompt], Tally]] = {}
        self.devices: tuple[str, ...] = ()
        """GPUs for this round's processes, as CUDA_VISIBLE_DEVICES names them; empty: whatever they see."""

    @cached_property
    def target(self) -> Target:
        """The target on disk (raises MissingTarget)."""
        return open_target(self.config.target, self.settings.models_dir)

    @cached_property
    def chat(self) -> Chat:
        """The target's tokenizer and chat template."""
        return Chat(self.target)

    @cached_property
    def history(self) -> History:
        """What the target's later turns see of its earlier answers."""
        return History(self.chat, self.config.prompts.template_args)

    @property
    def prompts(self) -> list[Prompt]:
        """Training prompts."""
        return self._chosen("prompts")[0]

    @property
    def evaluation_prompts(self) -> list[Prompt]:
        """Evaluation prompts."""
        return self._chosen("evaluate.prompts")[0]

    @property
    def left_out(self) -> dict[str, Tally]:
        """What was left out of ``prompts`` and of ``evaluate.prompts``."""
        return {name: self._chosen(name)[1] for name in ("prompts", "evaluate.prompts")}

    def _chosen(self, name: Literal["prompts", "evaluate.prompts"]) -> tuple[list[Prompt], Tally]:
        """Prompts and what was left out; chosen anew when the target has come, as its template may refuse some."""
        if name == "prompts":
            config, answers = self.config.prompts, self.config.generate.answers
        else:
            config, answers = self.config.evaluate.prompts, "target"
        refusal = self._refusal(config, given=answers == "given", later_turns=name == "prompts")
        key = (name, refusal is not None)
        if key not in self._choices:
            tally = Tally()
            self._choices[key] = load_prompts(config, answers, refusal=refusal, tally=tally), tally
        return self._choices[key]

    def _refusal(self, config: PromptsConfig, *, given: bool, later_turns: bool) -> Refusal | None:
        """Why the template refuses what is used of a prompt; None for built-in prompts and while there is no target."""
        if config.source.startswith(BUILTIN):
            return None
        try:
            chat = self.chat
        except MissingTarget:
            return None

        def refusal(prompt: Prompt) -> str | None:
            messages = next_prompt(prompt, ["."] * len(prompt.turns)) if later_turns else prompt.messages
            try:
                unseen = hides_a_question(messages, chat, config.template_args, add_generation_prompt=not given)
            except ConfigError as error:
                return str(error.__cause__ or error.what)
            return "it shows nothing of a question" if unseen else None

        return refusal

    @cached_property
    def start(self) -> Start | None:
        """The draft that training starts from; None where it starts anew (raises MissingDraft)."""
        return find_start(self.config.train.start, self.settings, self.store)

    @cached_property
    def store(self) -> ObjectStore:
        """The store that holds all rounds; a write that finds it full waits for room (:attr:`disk`)."""
        store = ObjectStore(self.settings.store)
        store.on_full = lambda error: self.disk.wait(error)
        return store

    @cached_property
    def disk(self) -> DiskGuard:
        """What keeps the round within its disk budget."""
        return DiskGuard(
            self.store,
            self.settings,
            self.config.name,
            budget=self.config.budget,
            retention=self.config.retention,
            keys=lambda: dict(self.keys.items()),
        )

    @cached_property
    def rounds(self) -> RoundStore:
        """This round's part of the store."""
        return RoundStore(self.store, self.config.name)

    @cached_property
    def versions(self) -> dict[str, str]:
        """Versions of the engines used and of the trainer."""
        found: dict[str, str] = {
            engine: engine_version(engine, self.config.engines[engine].device, self.settings)
            for engine in self.config.used_engines
        }
        return {**found, "speculators": importlib.metadata.version("speculators")}

    @cached_property
    def keys(self) -> StepKeys:
        """Keys of every step."""
        return step_keys(
            self.config,
            Inputs(
                target_revision=self.target.revision,
                prompts=prompts_digest(self.prompts),
                evaluation_prompts=prompts_digest(self.evaluation_prompts),
                versions=self.versions,
                samples=self._samples_key,
                start=self.start.digest if self.start is not None else None,
            ),
        )

    @cached_property
    def samples(self) -> Samples:
        """The samples of this key, by row (raises StoreError while they are not prepared)."""
        return Samples(self.store, self.prefix("samples"))

    @property
    def extracting(self) -> EngineConfig:
        """How the extracting engine runs."""
        return self.config.engines[self.config.extract.engine]

    @property
    def serving(self) -> EngineConfig:
        """How the serving engine runs."""
        return self.config.engines[self.config.serve_with]

    @property
    def scratch(self) -> Path:
        """Folder for this round's staging, journals and training; exists."""
        folder = self.settings.scratch_dir / self.config.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def lock(self) -> AbstractContextManager[None]:
        """Hold the round's lock on this machine (raises ConfigError while another process works on it)."""
        return round_lock(self.settings.run_dir, self.config.name)

    def prefix(self, step: str) -> str:
        """Where a step writes, below the store's root."""
        return self.rounds.step_prefix(step, getattr(self.keys, step))

    def environment(self, name: str) -> Path | None:
        """Python of an environment, or None when it is not built."""
        try:
            return environment_python(name, self.settings.cache_dir)
        except EnvironmentBuildError:
            return None
