"""Where the draft of ``train.from`` lies: a folder, a hub's repository, or what another round published."""

import os
import shutil
from pathlib import Path

from infra.config.settings import Settings
from infra.drafter.start import Start, read_start
from infra.engines.draft import WEIGHTS
from infra.engines.registry import as_trained
from infra.errors import MissingDraft, StoreError
from infra.machine.locks import exclusive
from infra.store.objects import ObjectStore
from infra.store.publications import live_publication
from infra.store.rounds import local_copy
from infra.targets.fetch import HUB
from infra.targets.hub import fetch_files

ROUND = "round:"
DRAFTS = ".drafts"
"""Folder beside the targets with drafts from elsewhere."""


def find_start(said: str, settings: Settings, store: ObjectStore) -> Start | None:
    """The draft that ``train.from`` names; None where it names none.

    Raises:
        MissingDraft: it is not here.
    """
    if not said:
        return None
    if said.startswith(ROUND):
        return read_start(said, _published(said, settings, store))
    if said.startswith("hf://"):
        folder = _hub_folder(said, settings)
        if not folder.is_dir():
            raise MissingDraft(
                f"the draft to start from ({said}) is not here yet", fix="the round fetches it when it is started"
            )
        return read_start(said, folder)
    return read_start(said, Path(said).expanduser())


def to_be_fetched(said: str, settings: Settings) -> bool:
    """Whether the draft comes from a hub and is not here yet."""
    return HUB.fullmatch(said) is not None and not _hub_folder(said, settings).is_dir()


def fetch_start(said: str, settings: Settings) -> None:
    """Fetch the draft from its hub, unless it is here or comes from elsewhere.

    Raises:
        MissingTarget: the hub cannot be reached, or does not have it.
    """
    named = HUB.fullmatch(said)
    if named is None:
        return
    folder = _hub_folder(said, settings)
    with exclusive(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            fetch_files(named["repository"], named["revision"], ("config.json", WEIGHTS), partial)
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _hub_folder(said: str, settings: Settings) -> Path:
    named = HUB.fullmatch(said)
    if named is None:
        raise MissingDraft(
            f"the draft to start from is {said!r}, which is no draft of a hub",
            expected="hf://org/draft@revision",
            fix="correct train.from",
        )
    name = f"{named['repository']}@{named['revision']}".replace("/", "--")
    return settings.models_dir / DRAFTS / name


def _published(said: str, settings: Settings, store: ObjectStore) -> Path:
    """The folder of what a round published last, as the trainer wrote it; from a remote store it is copied here."""
    name = said.removeprefix(ROUND)
    try:
        prefix = live_publication(store, name)
    except StoreError as error:
        raise MissingDraft(f"what round {name} published cannot be read: {error.what}", fix=error.fix) from error
    if prefix is None:
        raise MissingDraft(
            f"round {name} has published nothing in {settings.store}, and train.from is {said}",
            fix=f"run {name} to its end first, or correct train.from",
        )
    return local_copy(store, f"{prefix}/{as_trained()[0]}", settings.models_dir / DRAFTS / Path(prefix).name)
