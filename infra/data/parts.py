"""The files of a source of prompts: one file, a folder, or a glob, wherever fsspec reaches."""

import os
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from infra.errors import ConfigError

JSON = (".jsonl", ".ndjson", ".json")
COMPRESSED = ("", ".gz", ".bz2", ".xz", ".zst")
ENDINGS = (*(name + more for name in JSON for more in COMPRESSED), ".parquet", ".arrow")
SHOWN_ENDINGS = (*JSON, ".parquet", ".arrow")
ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What the library `datasets` writes beside the records."""


@dataclass(frozen=True)
class RecordFile:
    """A file of records.

    Attributes:
        fs: the file system it lies in.
        path: its path there.
        name: what a person calls it.
    """

    fs: Any
    path: str
    name: str

    @property
    def ending(self) -> str:
        """The name in lower case, without the query of a web address."""
        name = self.path.split("?")[0] if _on_the_web(self.fs) else self.path
        return name.lower()


def find_parts(source: str) -> tuple[list[RecordFile], list[str]]:
    """(the files of a source, sorted; files beside them that hold no records as far as their names tell).

    Of a folder all files below it are read, but hidden ones, those whose names begin with ``_``, and what is known to
    describe the data.

    Raises:
        ConfigError: there are none, or a single file is of no known kind.
    """
    if not source.strip():
        raise ConfigError("prompts.source is empty", expected="a file, a folder, a pattern of files, or builtin:train")
    fs, path = url_to_fs(source)
    path = str(path)
    if _on_the_web(fs):
        if "*" in path:
            raise ConfigError(
                f"prompts.source {source!r} is a pattern, and a web server tells no list of its files",
                fix="name one file, or fetch them into a folder",
            )
        return [_single(fs, path, source)], []
    local = "file" in _protocols(fs)
    if fsspec.core.has_magic(path) and not (local and os.path.exists(path)):
        found = {name: info for name, info in fs.glob(path, detail=True).items() if info.get("type") != "directory"}
        return _kept(fs, sorted(found), str(PurePosixPath(path).parent), source, local)
    if fs.isdir(path):
        return _kept(fs, sorted(fs.find(path)), path, source, local)
    return [_single(fs, path, source)], []


def _single(fs: Any, path: str, source: str) -> RecordFile:
    part = RecordFile(fs, path, source)
    if not PurePosixPath(part.ending).suffix and not fs.exists(path):
        raise FileNotFoundError(path)
    if not part.ending.endswith(ENDINGS):
        raise ConfigError(
            f"prompts.source {source!r} has no known ending",
            expected=f"one of {SHOWN_ENDINGS} (.gz, .bz2, .xz, .zst too), a folder or pattern of such files, "
            "or builtin:train",
        )
    return part


def _kept(fs: Any, paths: list[str], root: str, source: str, local: bool) -> tuple[list[RecordFile], list[str]]:
    parts, unread = [], []
    for path in paths:
        below = PurePosixPath(path.removeprefix(root.rstrip("/"))).parts
        if any(name.startswith((".", "_")) for name in below if name != "/"):
            continue
        part = RecordFile(fs, path, path if local else fs.unstrip_protocol(path))
        if part.ending.endswith(ENDINGS) and PurePosixPath(path).name.lower() not in ABOUT:
            parts.append(part)
        else:
            unread.append(part.name)
    if not parts:
        raise ConfigError(
            f"prompts.source {source!r} holds no file of records",
            expected=f"files that end in one of {SHOWN_ENDINGS}",
            fix="correct the path in the round file",
        )
    return parts, unread


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _on_the_web(fs: Any) -> bool:
    return bool({"http", "https"} & set(_protocols(fs)))
