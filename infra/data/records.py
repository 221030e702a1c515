"""Records of prompt files, read one by one.

Text is read with the standard library: pyarrow's and `datasets`' readers of JSON want one type for each field in the
whole file, and forget the lines. Parquet and Arrow are read by pyarrow.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from infra.data.layouts import LAYOUTS
from infra.data.parts import RecordFile, find_parts
from infra.data.tally import Tally, Unusable
from infra.errors import ConfigError

BATCH_ROWS = 1024
HEAD_BYTES = 1 << 16
CHUNK_CHARACTERS = 1 << 20
RECORD_CHARACTERS = 64 << 20
"""A record in a JSON list that is longer than this is taken for damage."""
NOT_JSON = "is not JSON"
HOLDERS = ("data", "rows", "records", "examples", "instances", "items", "samples", "prompts", "questions", "train")
"""Fields in which an object that is a whole file holds its records."""
SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def read_records(source: str, tally: Tally | None = None) -> Iterator[tuple[str, Any]]:
    """The records of a source, each with its place (``file:line``, or ``file:row`` in Parquet); never all in memory.

    A line that is not JSON comes as an :class:`Unusable`. What a file holds is told by its first bytes: lines, one list
    of records, values over several lines, compressed or not.

    Args:
        source: a path or an fsspec URL of a file, a folder or a pattern of files.
        tally: told which files of a folder are not read.

    Raises:
        ConfigError: a file is missing, of another kind, damaged, or cut.
    """
    place = source
    try:
        parts, unread = find_parts(source)
        if tally is not None and unread:
            more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
            tally.notes.append(f"not read in {source}, as their names tell no records: {', '.join(unread[:3])}{more}")
        for part in parts:
            place = part.name
            for place, record in _read(part):
                yield place, record
    except FileNotFoundError as error:
        unreachable = f", or cannot be reached: {error.__cause__}" if error.__cause__ else ""
        raise ConfigError(
            f"prompts.source {place!r} does not exist{unreachable}", fix="correct the path in the round file"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # each protocol and format has a library with errors of its own
        raise ConfigError(
            f"{source} cannot be read after {place}: {error}", expected="a whole, undamaged file"
        ) from error


def _read(part: RecordFile) -> Iterator[tuple[str, Any]]:
    with ExitStack() as stack:
        raw = stack.enter_context(part.fs.open(part.path, "rb"))
        if part.ending.endswith((".parquet", ".arrow")):
            yield from _rows(part, raw)
        else:
            plain = stack.enter_context(io.BufferedReader(raw, HEAD_BYTES))
            yield from _json(part.name, stack.enter_context(_decompressed(plain)))


def _rows(part: RecordFile, raw: Any) -> Iterator[tuple[str, Any]]:
    number = count(1)
    for batch in _batches(part, raw):
        # No prompt is made of dates, and Python cannot hold all that a file can.
        columns = [place for place, field in enumerate(batch.schema) if not pyarrow.types.is_temporal(field.type)]
        batch = batch.select(columns)
        plain = _dateless(batch.schema)
        batch = batch if plain.equals(batch.schema) else batch.cast(plain)
        for record in batch.to_pylist(maps_as_pydicts="lossy"):
            yield f"{part.name}:{next(number)}", record


def _dateless(schema: Any) -> Any:
    """A schema with numbers where messages carry dates."""
    return pyarrow.schema([field.with_type(_numbers(field.type)) for field in schema])


def _numbers(kind: Any) -> Any:
    if pyarrow.types.is_temporal(kind):
        return pyarrow.int32() if kind.bit_width == 32 else pyarrow.int64()
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_numbers(field.type)) for field in kind])
    for is_list, make in ((pyarrow.types.is_list, pyarrow.list_), (pyarrow.types.is_large_list, pyarrow.large_list)):
        if is_list(kind):
            return make(kind.value_field.with_type(_numbers(kind.value_type)))
    return kind


def _batches(part: RecordFile, raw: Any) -> Iterator[Any]:
    if part.ending.endswith(".parquet"):
        with pyarrow.parquet.ParquetFile(raw) as table:
            yield from table.iter_batches(batch_size=BATCH_ROWS)
        return
    is_file = raw.read(6) == b"ARROW1"
    raw.seek(0)
    if is_file:
        reader = pyarrow.ipc.open_file(raw)
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(raw)


def _decompressed(plain: Any) -> Any:
    """A buffered reader of a file, whatever it is compressed with; all of them refuse a stream that is cut."""
    head = plain.peek(8)
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=plain)
    if head.startswith(b"BZh"):
        return bz2.BZ2File(plain)
    if head.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(plain)
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
        zstd: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(plain, mode="r"), "zstd")
        return io.BufferedReader(zstd)
    return plain


def _json(name: str, stream: Any) -> Iterator[tuple[str, Any]]:
    head = stream.peek(HEAD_BYTES)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{name} is UTF-16", expected="UTF-8", fix="write the file again as UTF-8")
    if head.startswith(b"version https://git-lfs"):
        raise ConfigError(f"{name} is a pointer of Git LFS, not the file itself", fix="run `git lfs pull` there")
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
        head = head[len(codecs.BOM_UTF8) :]
    return _values(name, stream) if _spans_lines(head) else _lines(name, stream)


def _spans_lines(head: bytes) -> bool:
    """Whether a file is one list of records, or has records of several lines; not one record a line."""
    first, newline, rest = head.lstrip().partition(b"\n")
    if first.rstrip() == b"{":
        return True
    if not first.startswith(b"[") and _list_inside(head.decode(errors="ignore")) is None:
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return not (newline and rest.strip())


def _list_inside(text: str, at: int = 0) -> int | None:
    """Where the records begin in an object that is there to hold them, as `{"data": [{...` does; None if it is none."""
    try:
        mark, at = "{", _skip(text, at)
        while text.startswith(mark, at):
            name, at = _DECODER.raw_decode(text, _skip(text, at + 1))
            at = _skip(text, _skip(text, at) + 1)
            if name in HOLDERS and text.startswith("[", at) and text.startswith("{", _skip(text, at + 1)):
                return at + 1
            if name in LAYOUTS:
                return None
            _, at = _DECODER.raw_decode(text, at)
            mark, at = ",", _skip(text, at)
    except (ValueError, RecursionError):
        pass
    return None


def _skip(text: str, at: int) -> int:
    """The place of the next character that is no white space."""
    found = SPACE.match(text, at)
    return found.end() if found else at


def _lines(name: str, stream: Any) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):
                raise ConfigError(
                    f"{place} {NOT_JSON} ({_fault(error)}), and the file ends there without a newline, "
                    "as a cut one does",
                    expected="a whole file",
                    fix="fetch or write the file again, or remove the line",
                ) from error
            yield place, Unusable(NOT_JSON, _fault(error))
        else:
            yield place, record


def _fault(error: Exception) -> str:
    """What is wrong, without the line and column that the parser counts within its own piece of text."""
    return error.msg.lower() if isinstance(error, json.JSONDecodeError) else str(error)


def _values(name: str, stream: Any) -> Iterator[tuple[str, Any]]:
    """The elements of one JSON list, or JSON values one after the other; one of them in memory at a time.

    The list may stand in an object that is there to hold it.
    """
    with io.TextIOWrapper(stream, encoding="utf-8") as characters:
        text = _Window(name, characters)
        held = text.enter_holder()
        in_list = held or text.next() == "["
        if in_list and not held:
            text.skip()
        for number in count(1):
            character = text.next()
            if character == "" and not in_list:
                return
            if character == "]" and in_list:
                break
            place = f"{name}:{text.line} (record {number})"
            yield place, text.value()
            if text.next() == "," and in_list:
                text.skip()
        text.skip()
        if held:
            text.leave_holder()
        if text.next():
            raise ConfigError(f"{name}:{text.line} goes on after its list ends", expected="one list of records")


class _Window:
    """What is at hand of a text that is read from front to back."""

    def __init__(self, name: str, stream: io.TextIOWrapper) -> None:
        self._name, self._stream = name, stream
        self._text, self._at = "", 0
        self.line = 1

    def next(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self.skip()
            if not self._more(CHUNK_CHARACTERS):
                return ""

    def skip(self) -> None:
        """Go past one character."""
        self.line += self._text[self._at] == "\n"
        self._at += 1

    def value(self) -> Any:
        """The JSON value that begins here.

        Raises:
            ConfigError: there is none, or it does not end.
        """
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._more(CHUNK_CHARACTERS):
                    self.line += self._text.count("\n", self._at, end)
                    self._at = end
                    return value
            except (ValueError, RecursionError) as error:
                known = len(self._text) - self._at
                end = error.pos if isinstance(error, json.JSONDecodeError) else self._at
                line = self.line + self._text.count("\n", self._at, end)
                if isinstance(error, RecursionError) or known > RECORD_CHARACTERS or not self._more(known):
                    raise ConfigError(
                        f"{self._name}:{line} {NOT_JSON}: {_fault(error)}", fix="correct the file, or fetch it again"
                    ) from error

    def enter_holder(self) -> bool:
        """Go past `{"data": [` to the first record, where the text is an object that holds records."""
        self.next()
        inside = _list_inside(self._text, self._at)
        if inside is None:
            return False
        self.line += self._text.count("\n", self._at, inside)
        self._at = inside
        return True

    def leave_holder(self) -> None:
        """Go past all that stands behind the records.

        Raises:
            ConfigError: the object does not end, or holds more that is asked of a target.
        """
        while self.next() == ",":
            self._expect(",")
            self.next()
            name = self.value()
            self._expect(":")
            self.next()
            value = self.value()
            if name in LAYOUTS or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
                raise ConfigError(
                    f"{self._name}:{self.line} has more beside its list of records: {name!r:.60}",
                    expected="one list of records in a file",
                    fix="write each list to a file of its own",
                )
        self._expect("}")

    def _expect(self, character: str) -> None:
        if self.next() != character:
            raise ConfigError(
                f"{self._name}:{self.line} {NOT_JSON}: expecting {character!r}",
                fix="correct the file, or fetch it again",
            )
        self.skip()

    def _more(self, characters: int) -> bool:
        """Read on; what is behind is forgotten. False at the end of the file."""
        read = self._stream.read(max(characters, CHUNK_CHARACTERS))
        self._text, self._at = self._text[self._at :] + read, 0
        return bool(read)
