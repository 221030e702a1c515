"""Opening a target's tokenizer: what it lacks is said by name, and none that cannot tokenise is taken for one.

Read and run with transformers 5.19: of a folder without a vocabulary it makes an empty tokenizer without a word, and a
tokenizer that comes as code may want packages, or names of transformers, that are not there.
"""

import importlib
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from infra.config.json_file import read_json
from infra.errors import ConfigError
from infra.targets.files import vocabularies, vocabulary_fault

TRUST = "read that code and, if you trust it, set target.trust_remote_code: true"
PROBE = "Hello, world 123"
MOVED = (
    ("transformers.models.gpt2.tokenization_gpt2", "bytes_to_unicode", "transformers.convert_slow_tokenizer"),
    ("transformers.models.qwen2.tokenization_qwen2", "bytes_to_unicode", "transformers.convert_slow_tokenizer"),
)
"""What tokenizers' code (as Kimi-K2's) imports from where transformers 4 had it, and where transformers 5 has it."""


def open_tokenizer(folder: Path, target: str, trust_remote_code: bool) -> Any:
    """The tokenizer in a target's folder; nothing is fetched.

    Args:
        folder: the target's folder.
        target: its name, for errors.
        trust_remote_code: whether Python code in the folder may run.

    Raises:
        ConfigError: it cannot be opened, or does not tokenise; says which file, package or name is missing.
    """
    where = f"the tokenizer of target {target} cannot be loaded from {folder}"
    names = sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    what, fix = vocabulary_fault(names)
    if what:
        raise ConfigError(f"{where}: {what}", fix=fix)
    code = _own_code(folder)
    if code and not trust_remote_code and "tokenizer.json" not in names:
        # transformers would make another one of its vocabulary, which splits texts in its own way.
        raise ConfigError(f"{where}: it comes as Python code ({code})", fix=TRUST)
    if trust_remote_code:
        _offer_moved_names()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            config=_config(folder, trust_remote_code),
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
        ids = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    except Exception as error:  # of damaged files and foreign code these libraries raise whatever comes
        what, fix = _why(error, folder, names)
        raise ConfigError(f"{where}: {what}", fix=fix) from error
    if not ids or set(ids) == {tokenizer.unk_token_id}:
        raise ConfigError(
            f"{where}: of {_listed(vocabularies(names))} transformers made one of {len(tokenizer)} tokens, which knows "
            f"none of the words {PROBE!r}",
            fix="get the files that are missing or damaged from the model's publisher",
        )
    return tokenizer


def give_template(tokenizer: Any, folder: Path, target: str) -> None:
    """See that a tokenizer has its chat template; those of the folder's processor files count too.

    Raises:
        ConfigError: there is none; or there are named templates, and which one is meant is not said; or a file is
            damaged.
    """
    template = _template(tokenizer, folder, target)
    if template is not None:
        tokenizer.chat_template = template
    elif not _renders_itself(tokenizer):
        raise ConfigError(
            f"target {target} has no chat template",
            expected="chat_template.jinja or chat_template.json beside its tokenizer",
            fix="a base model has none: take the one that is trained to chat, or write its template there",
        )


def _renders_itself(tokenizer: Any) -> bool:
    """Whether the tokenizer's own code renders conversations and needs no template (Kimi-K3's does)."""
    if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        return False
    try:
        return bool(tokenizer.apply_chat_template([{"role": "user", "content": PROBE}], tokenize=False))
    except Exception:  # foreign code; most hands on to transformers, which wants a template
        return False


def _template(tokenizer: Any, folder: Path, target: str) -> Any:
    """The template or named templates of a tokenizer, else those of the folder's processor files; None when none."""
    found = tokenizer.chat_template
    for name in ("chat_template.json", "processor_config.json"):
        if not found and (folder / name).is_file():
            found = read_json(folder / name).get("chat_template")
    if isinstance(found, list):
        try:
            found = {entry["name"]: entry["template"] for entry in found}
        except (TypeError, KeyError) as error:
            raise ConfigError(f"the chat templates of target {target} are not a list of names and templates") from error
    if isinstance(found, dict) and found and "default" not in found:
        raise ConfigError(
            f"target {target} has the named chat templates {_listed(sorted(map(str, found)))}, and none is `default`",
            fix=f"write the one that you serve with to {folder / 'chat_template.jinja'}",
        )
    texts = list(found.values()) if isinstance(found, dict) else [found]
    if found and not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"the chat template of target {target} is no text: {found!r:.80}")
    return found or None


def _config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """What transformers chooses the tokenizer's class by: the target's config, else a bare one of its family.

    Left alone, it reads the fields of a family that it does not know into a bare config as well, and rope fields that
    want others beside them (Kimi-K2's) end that with an AttributeError.
    """
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, OSError):
        path = folder / "config.json"
        raw = read_json(path) if path.is_file() else {}
        return PreTrainedConfig(**{name: raw[name] for name in ("model_type", "tokenizer_class") if raw.get(name)})


def _offer_moved_names() -> None:
    for old, name, new in MOVED:
        module = importlib.import_module(old)
        if not hasattr(module, name):
            setattr(module, name, getattr(importlib.import_module(new), name))


def _why(error: Exception, folder: Path, names: list[str]) -> tuple[str, str]:
    """What failed, and what mends it."""
    install = f"install what is missing where this runs: {sys.executable} -m pip install"
    said, code = " ".join(str(error).split()), _own_code(folder)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("transformers."):
        package = error.name.split(".")[0]
        return f"it needs the Python package {package}, which is not installed", f"{install} {package}"
    if isinstance(error, ImportError):
        if wanted := re.search(r"not found in your environment: ([\w\s,.-]+)\.", said):
            packages = wanted[1].replace(",", " ").split()
            return f"it needs the Python packages {_listed(packages)}, which are not installed", (
                f"{install} {' '.join(packages)}"
            )
        return (
            f"its code does not fit transformers {transformers.__version__}: {said.split(' (')[0]}",
            "take a revision of the target whose code does, or mend the import in its folder",
        )
    if isinstance(error, ValueError) and "trust_remote_code" in said:
        return f"it comes as Python code ({code})", TRUST
    if isinstance(error, ValueError) and "Couldn't instantiate the backend tokenizer" in said:
        return (
            f"transformers can make none of {_listed(vocabularies(names))} for this family",
            "get tokenizer.json from the model's publisher",
        )
    if isinstance(error, NotImplementedError):
        method = traceback.extract_tb(error.__traceback__)[-1].name
        return f"its code ({code}) does not implement {method}()", "take a revision of the target whose code does"
    return f"{type(error).__name__}: {said or 'no reason given'}; there are {_listed(names)}", ""


def _own_code(folder: Path) -> str:
    """The module and class that ``tokenizer_config.json`` names as the tokenizer's own; empty when it names none."""
    path = folder / "tokenizer_config.json"
    try:
        named = read_json(path).get("auto_map") if path.is_file() else None
    except ConfigError:
        return ""  # opening the tokenizer tells more
    if isinstance(named, dict):
        named = named.get("AutoTokenizer")
    return next((str(name) for name in named if name), "") if isinstance(named, list) else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
