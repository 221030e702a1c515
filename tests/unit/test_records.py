"""Which files a source has, and what is read of each: whole, or an error that names it."""

import bz2
import gzip
import json
import lzma
import random
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import s3fs
from moto.moto_server import threaded_moto_server

from infra.data.records import read_records
from infra.data.tally import Tally, Unusable
from infra.errors import ConfigError

RECORDS = [{"prompt": f"Question {number} " + "x" * 40} for number in range(300)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
ARRAY = json.dumps(RECORDS).encode()
PRETTY = json.dumps(RECORDS, indent=1).encode()


def records(source: str | Path, tally: Tally | None = None) -> list[Any]:
    return [record for _, record in read_records(str(source), tally)]


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def parquet(path: Path, rows: list[dict[str, Any]] = RECORDS) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.JSONL", "p.json", "p.ndjson", "p.Json"])
@pytest.mark.parametrize("body", [LINES, ARRAY, PRETTY, b"\n \n" + LINES, b"\xef\xbb\xbf" + PRETTY, LINES.rstrip()])
def test_content_decides_how_text_is_read(name: str, body: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(body)
    assert records(tmp_path / name) == RECORDS
    (tmp_path / name).write_bytes(body.replace(b"\n", b"\r\n"))
    assert records(tmp_path / name) == RECORDS


@pytest.mark.parametrize(("ending", "squeeze"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress),
                                                  ("zst", zstd), ("GZ", gzip.compress)])  # fmt: skip
def test_compressed_files_are_read_whole_or_not_at_all(ending: str, squeeze: Any, tmp_path: Path) -> None:
    noise = b"".join(json.dumps({"prompt": str(random.Random(n).random())}).encode() + b"\n" for n in range(3000))
    path = tmp_path / f"p.jsonl.{ending}"
    path.write_bytes(squeeze(LINES))
    assert records(path) == RECORDS
    path.write_bytes(squeeze(PRETTY))
    assert records(path) == RECORDS
    whole = squeeze(noise)
    for length in (len(whole) - 1, len(whole) - 9, len(whole) // 2, 30):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=rf"p\.jsonl\.{ending} cannot be read after"):
            records(path)
    (tmp_path / "plain.jsonl.gz").write_bytes(LINES)  # as browsers leave them
    assert records(tmp_path / "plain.jsonl.gz") == RECORDS


HELD = [
    json.dumps({"data": RECORDS}).encode(),
    json.dumps(
        {"schema": {"fields": [{"name": "a"}]}, "version": "2", "rows": RECORDS, "total": 300}, indent=1
    ).encode(),
    b"\n" + json.dumps({"examples": RECORDS}).encode() + b"\n",
]


@pytest.mark.parametrize("body", HELD)
def test_an_object_may_hold_the_list_of_records(body: bytes, tmp_path: Path) -> None:
    for name, data in (("p.json", body), ("p.jsonl", body.replace(b"\n", b"\r\n")), ("p.json.gz", gzip.compress(body))):
        (tmp_path / name).write_bytes(data)
        assert records(tmp_path / name) == RECORDS
    for cut in (len(body.rstrip()) - 1, len(body) // 2):
        (tmp_path / "p.json").write_bytes(body[:cut])
        with pytest.raises(ConfigError, match=r"p\.json:\d+ is not JSON"):
            records(tmp_path / "p.json")


def test_records_that_an_object_holds_keep_their_lines(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"version": 1,\n "data": [\n  {"prompt": "a"},\n  {"prompt": "b"}\n ]}')
    places = [place for place, _ in read_records(str(tmp_path / "p.json"))]
    assert [place.removeprefix(f"{tmp_path}/p.json:") for place in places] == ["3 (record 1)", "4 (record 2)"]


def test_lines_that_hold_lists_are_records(tmp_path: Path) -> None:
    line = json.dumps({"data": [{"role": "user", "content": "Hi"}]})
    (tmp_path / "p.jsonl").write_text(f"{line}\n{line}\n")
    assert records(tmp_path / "p.jsonl") == [json.loads(line)] * 2
    for record in ({"prompt": "a", "data": RECORDS}, {"tools": RECORDS, "prompt": "a"}):
        (tmp_path / "p.json").write_text(json.dumps(record))
        assert records(tmp_path / "p.json") == [record]


def test_one_part_of_zstandard_may_be_skipped(tmp_path: Path) -> None:
    """As pzstd and seekable files have one in front."""
    (tmp_path / "p.jsonl.zst").write_bytes(bytes.fromhex("502a4d1804000000") + b"\0" * 4 + zstd(LINES))
    assert records(tmp_path / "p.jsonl.zst") == RECORDS


def test_a_broken_line_is_one_record_and_a_cut_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b\n\xff\xfe\n{"prompt": "c"}\n')
    found = list(read_records(str(path)))
    assert [place.rpartition(":")[2] for place, _ in found] == ["1", "2", "3", "4"]
    assert [isinstance(record, Unusable) for _, record in found] == [False, True, True, False]
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b')
    with pytest.raises(ConfigError, match=r"p\.jsonl:2 is not JSON .*, and the file ends there"):
        records(path)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (PRETTY[:-40], r"p\.json:\d+ is not JSON"),
        (PRETTY[:-2], r"p\.json:\d+ is not JSON"),
        (b'[\n {"prompt": "a"},\n {"prompt": b},\n {"prompt": "c"}\n]', r"p\.json:3 is not JSON"),
        (b'[\n {"prompt": "a"}\n]\n{"prompt": "b"}', r"p\.json:4 goes on after its list ends"),
        (b'[{"prompt": ' + b"[" * 100_000, r"p\.json:1 is not JSON"),
        (b'{"data": [{"prompt": "a"}],\n "test": [{"prompt": "b"}]}', r"p\.json:2 has more beside its list .*'test'"),
        (b'{"data": [{"prompt": "a"}]} {"prompt": "b"}', r"p\.json:1 goes on after its list ends"),
        (b'{"data": [{"prompt": "a"}], "n" 1}', r"p\.json:1 is not JSON: expecting ':'"),
        (LINES.decode().encode("utf-16"), r"p\.json is UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"p\.json is a pointer of Git LFS"),
    ],
)
def test_a_damaged_list_is_refused_by_line(body: bytes, fault: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(body)
    with pytest.raises(ConfigError, match=fault):
        records(tmp_path / "p.json")


def test_a_line_may_be_a_list_of_messages(tmp_path: Path) -> None:
    line = json.dumps([{"role": "user", "content": "Hi"}])
    (tmp_path / "p.jsonl").write_text(f"{line}\n{line}\n")
    assert records(tmp_path / "p.jsonl") == [json.loads(line)] * 2


def test_empty_files_hold_nothing(tmp_path: Path) -> None:
    for body in (b"", b"\n\n", b"[]", b"[\n]\n", gzip.compress(b"")):
        (tmp_path / "p.jsonl").write_bytes(body)
        assert records(tmp_path / "p.jsonl") == []
    parquet(tmp_path / "p.parquet", [])
    assert records(tmp_path / "p.parquet") == []


def test_arrow_files_of_both_kinds(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    for name, new in (("file.arrow", pyarrow.ipc.new_file), ("stream.arrow", pyarrow.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
        assert records(tmp_path / name) == RECORDS
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-600])
        with pytest.raises(ConfigError, match=rf"{name} cannot be read|{name}:\d+"):
            records(tmp_path / name)


def test_a_date_that_python_cannot_hold_is_in_nobodys_way(tmp_path: Path) -> None:
    dates = pa.array([10**15, None], pa.timestamp("s"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "made": dates}), tmp_path / "p.parquet")
    assert records(tmp_path / "p.parquet") == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize("kind", [pa.timestamp("us", tz="UTC"), pa.timestamp("ns", tz="Mars/Base"), pa.duration("ns")])
def test_dates_in_messages_are_in_nobodys_way(tmp_path: Path, kind: pa.DataType) -> None:
    said = pa.struct([("role", pa.string()), ("content", pa.string()), ("timestamp", kind)])
    messages = [[{"role": "user", "content": "a", "timestamp": 2**62}]]
    pq.write_table(pa.table({"conversation": pa.array(messages, pa.list_(said))}), tmp_path / "p.parquet")
    [record] = records(tmp_path / "p.parquet")
    assert record["conversation"][0]["content"] == "a"


def test_what_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none", "none/"):
        with pytest.raises(ConfigError, match="does not exist"):
            records(f"{tmp_path}/{name}")
    with pytest.raises(ConfigError, match=r"prompts\.source is empty"):
        records("")
    with pytest.raises(ConfigError, match="does not exist, or cannot be reached"):
        records("http://127.0.0.1:9/p.jsonl")


def test_columns_of_any_type_are_read_as_what_they_hold(tmp_path: Path) -> None:
    said = [[{"role": "user", "content": "Hi"}]]
    shape = pa.list_(pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("content", pa.large_string())]))
    table = pa.table({"messages": pa.array(said, shape), "kind": pa.array(["x"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "p.PARQUET")
    assert records(tmp_path / "p.PARQUET") == [{"messages": said[0], "kind": "x"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Parts of RECORDS beside what is none of them."""
    folder = tmp_path / "my data[1]"
    (folder / "more" / ".hidden").mkdir(parents=True)
    (folder / "_temporary").mkdir()
    (folder / "a.jsonl").write_bytes(b"".join(LINES.splitlines(keepends=True)[:100]))
    parquet(folder / "b.snappy.parquet", RECORDS[100:200])
    (folder / "more" / "c.JSON").write_text(json.dumps(RECORDS[200:]))
    (folder / "more" / "d.jsonl").write_text("")
    for name in ("_SUCCESS", ".a.jsonl.crc", "more/.hidden/x.jsonl", "_temporary/x.jsonl", "dataset_info.json"):
        (folder / name).write_text("no record")
    (folder / "README.md").write_text("About.")
    return folder


def test_a_folder_is_all_its_parts(folder: Path) -> None:
    tally = Tally()
    assert records(folder, tally) == records(f"{folder}/") == records(f"file://{folder}") == RECORDS
    (note,) = tally.notes
    assert note.endswith(f"{folder}/README.md, {folder}/dataset_info.json")
    places = [place for place, _ in read_records(str(folder))]
    assert [places[0], places[100]] == [f"{folder}/a.jsonl:1", f"{folder}/b.snappy.parquet:1"]


def test_a_pattern_is_the_files_that_it_names(folder: Path) -> None:
    assert records(folder.parent / "my*" / "?.jsonl") == RECORDS[:100]
    assert records(folder.parent / "my*" / "*") == RECORDS[:200]
    assert records(folder.parent / "**" / "*.JSON") == RECORDS[200:]
    with pytest.raises(ConfigError, match="holds no file of records"):
        records(folder.parent / "my*" / "z*.jsonl")


def test_a_folder_may_be_named_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "out.parquet").mkdir()
    parquet(tmp_path / "out.parquet" / "part-0.parquet")
    assert records(tmp_path / "out.parquet") == RECORDS


def test_a_damaged_part_is_named(folder: Path) -> None:
    (folder / "b.snappy.parquet").write_bytes((folder / "b.snappy.parquet").read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"cannot be read after .*b\.snappy\.parquet"):
        records(folder)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no file of records"):
        records(tmp_path)
    (tmp_path / "_SUCCESS").write_text("")
    with pytest.raises(ConfigError, match="holds no file of records"):
        records(tmp_path)


def test_patterns_and_folders_in_other_stores() -> None:
    for name, body in (("a.jsonl", LINES), ("b.jsonl", LINES), ("c.txt", b"")):
        with fsspec.open(f"memory://bucket/parts/{name}", "wb") as stream:
            stream.write(body)
    for source in ("memory://bucket/parts", "memory://bucket/parts/*.jsonl"):
        assert records(source) == RECORDS * 2
    assert next(iter(read_records("memory://bucket/parts")))[0] == "memory:///bucket/parts/a.jsonl:1"


def test_patterns_in_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    server = threaded_moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("DEFAULT_REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        s3fs.S3FileSystem.clear_instance_cache()  # one that an earlier test made remembers its environment
        client = boto3.client("s3")
        client.create_bucket(Bucket="data")
        for name in ("a", "b"):
            client.put_object(Bucket="data", Key=f"parts/{name}.jsonl", Body=LINES)
        assert records("s3://data/parts/*.jsonl") == records("s3://data/parts") == RECORDS * 2
        assert next(iter(read_records("s3://data/parts/?.jsonl")))[0] == "s3://data/parts/a.jsonl:1"
        with pytest.raises(ConfigError, match=r"'s3://data/none\.jsonl' does not exist"):
            records("s3://data/none.jsonl")
    finally:
        server.stop()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server's address; it serves tmp_path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_files_on_the_web(web: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(LINES)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(PRETTY))
    for source in ("p.jsonl", "p.jsonl?download=true", "p.jsonl.gz"):
        assert records(f"{web}/{source}") == RECORDS
    with pytest.raises(ConfigError, match="a web server tells no list"):
        records(f"{web}/*.jsonl")
    with pytest.raises(ConfigError, match="does not exist"):
        records(f"{web}/none.jsonl")


@pytest.mark.parametrize("form", ["lines", "list"])
def test_a_large_file_is_never_all_in_memory(form: str, tmp_path: Path) -> None:
    line = json.dumps({"prompt": "x" * 10_000})
    before, between, after = ("", "\n", "\n") if form == "lines" else ("[", ",", "]")
    (tmp_path / "p.json").write_text(before + between.join([line] * 4000) + after)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_records(str(tmp_path / "p.json"))) == 4000
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
