"""A target from a model hub: judged by the list of its files, then by its small ones, before its weights come."""

import functools
import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from infra.errors import ConfigError, MissingTarget
from infra.machine.network import check_network
from infra.targets.files import INDEX, weight_names, whole_fault
from infra.targets.target import read_shape
from infra.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from huggingface_hub import DryRunFileInfo

log = logging.getLogger(__name__)

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
WEIGHTS = ("*.safetensors",)
LEFT_OUT = ("consolidated*", "adapter_*", "*/*.safetensors", "*/*.json")
"""The same weights in other layouts (as Mistral's and gpt-oss's repositories carry them): half of the bytes saved."""


def fetch_snapshot(repository: str, revision: str, code: bool, folder: Path) -> None:
    """Weights, config and tokenizer (and code, where it is trusted) of one revision of a hub's repository.

    Args:
        repository: ``org/model``.
        revision: branch, tag or commit.
        code: whether the target's own Python code is fetched and may run.
        folder: where the files go; files of the same revision that are there stay.

    Raises:
        MissingTarget: the repository cannot be reached, can be no whole target, or does not fit on the disk. Of its
            weights nothing has been fetched then, unless the line broke.
    """
    check_network()
    from huggingface_hub import HfApi, snapshot_download

    name = f"{repository}@{revision}"
    with _reached(name):
        # By its commit: a branch that moves meanwhile changes nothing.
        commit = HfApi().model_info(repository, revision=revision).sha or revision
        files = HfApi().list_repo_files(repository, revision=commit)
    _refuse(name, *whole_fault(file for file in files if "/" not in file))
    log.info(f"{name}: downloading")
    get = functools.partial(snapshot_download, repository, revision=commit, local_dir=folder)
    small = [*SMALL_FILES, "*.py"] if code else list(SMALL_FILES)
    with _reached(name):
        get(allow_patterns=small, ignore_patterns=list(LEFT_OUT))
    if lack := _judge_small_files(name, folder, files, code):
        log.info(f"{name}: {lack}")
    with _reached(name):
        weights = functools.partial(get, allow_patterns=list(WEIGHTS), ignore_patterns=list(LEFT_OUT))
        _check_room(repository, cast("list[DryRunFileInfo]", weights(dry_run=True)), folder)
        weights()
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def fetch_files(repository: str, revision: str, names: Sequence[str], folder: Path) -> None:
    """Some files of one revision of a hub's repository.

    Args:
        names: the files, as the repository names them.
        folder: where they go.

    Raises:
        MissingTarget: the repository cannot be reached, lacks one of them, or they do not fit on the disk.
    """
    check_network()
    from huggingface_hub import snapshot_download

    name = f"{repository}@{revision}"
    folder.mkdir(parents=True, exist_ok=True)
    log.info(f"{name}: downloading")
    with _reached(name):
        get = functools.partial(
            snapshot_download, repository, revision=revision, local_dir=folder, allow_patterns=list(names)
        )
        _check_room(repository, cast("list[DryRunFileInfo]", get(dry_run=True)), folder)
        get()
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if lacking := [file for file in names if not (folder / file).is_file()]:
        raise MissingTarget(f"{name} has no {' and no '.join(lacking)}", fix="check the name and the revision")


def _judge_small_files(name: str, folder: Path, files: Sequence[str], code: bool) -> str:
    """Refuse what its index, config or tokenizer tells to be unusable; the answer is what a round will miss."""
    from infra.targets.tokenizer import give_template, open_tokenizer  # it takes seconds to import

    if (folder / INDEX).is_file():
        missing = sorted(_indexed(folder / INDEX) - set(weight_names(files)))
        if missing:
            what = f"its index names {len(missing)} weight files that it does not have, such as {missing[0]}"
            _refuse(name, what, "name a revision that is whole")
    try:
        read_shape(folder, code)
        tokenizer = open_tokenizer(folder, name, code)
    except ConfigError as error:
        raise MissingTarget(
            f"{name} cannot be a target: {error.what}", expected=error.expected, fix=error.fix
        ) from error
    try:
        give_template(tokenizer, folder, name)
    except ConfigError as error:
        return str(error)  # it can be written beside the weights
    return ""


def _indexed(path: Path) -> set[str]:
    try:
        return set(map(str, json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()  # the weights' own headers are checked when the target is opened


def _refuse(name: str, what: str, fix: str) -> None:
    if what:
        raise MissingTarget(
            f"{name} cannot be a target: {what}", expected="config.json, a tokenizer and *.safetensors", fix=fix
        )


@contextmanager
def _reached(name: str) -> "Iterator[None]":
    """Around requests to the hub: what it answers, in one sentence."""
    import httpx2
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except GatedRepoError as error:
        raise MissingTarget(
            f"{name} is closed: its publisher gives it only to those who were let in",
            fix="accept its terms on its page of the hub, set HF_TOKEN to a token of that account, then fetch again",
        ) from error
    except OfflineModeIsEnabled as error:
        raise MissingTarget(
            f"{name} cannot be fetched: HF_HUB_OFFLINE is set", fix="unset it, or copy it here"
        ) from error
    except HFValidationError as error:
        raise MissingTarget(
            f"{name} is no name of a repository: {error}", expected="hf://org/model@revision"
        ) from error
    except (DryRunError, HfHubHTTPError, LocalEntryNotFoundError, httpx2.HTTPError) as error:
        said = str(error).strip() or type(error).__name__
        raise MissingTarget(
            f"{name} could not be downloaded: {said.splitlines()[0]}",
            expected="a repository and revision that the model hub has, and a way to reach it",
            fix="check the name, HF_TOKEN (for closed models) and HF_ENDPOINT or HTTPS_PROXY, then fetch again",
        ) from error


def _check_room(repository: str, files: "Sequence[DryRunFileInfo]", folder: Path) -> None:
    """Refuse weights before their first byte when what is still to come does not fit."""
    to_come, free = sum(item.file_size or 0 for item in files if item.will_download), shutil.disk_usage(folder).free
    if to_come > free:
        raise MissingTarget(
            f"{repository} needs {size(to_come)} more and {size(free)} are free at {folder}",
            fix="make room, or set EAGLE3_MODELS_PATH to a larger disk, then fetch again",
        )
