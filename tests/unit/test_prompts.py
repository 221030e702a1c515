import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.config.round import PromptsConfig
from infra.data.prompts import Prompt, load_prompts, next_prompt, prompts_digest
from infra.errors import ConfigError


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def load(source: str, count: int = 1, answers: Literal["target", "given"] = "target", **fields: Any) -> list[Prompt]:
    return load_prompts(PromptsConfig(source=source, count=count, **fields), answers)


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


SYSTEM = {"role": "system", "content": "Be brief."}
PINNED = [
    ["r6", "r27", "r28", "r11", "r10"],
    ["r7", "r17", "r12", "r4", "r14"],
    ["8170fcb1db1ec7a2", "e8b7ed6859e5247a", "b3f2a83e52ac9cb5"],
    ["1fd7451ede95739a", "18e9945e4569e8c4"],
]


@pytest.mark.parametrize(
    ("record", "messages", "turns"),
    [
        ({"messages": user("Hi")}, user("Hi"), []),
        ({"messages": [SYSTEM, *user("Hi", "Hello", "Bye")]}, [SYSTEM, *user("Hi")], ["Bye"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, user("Hi"), []),
        ({"turns": ["Hi", "Bye"]}, user("Hi"), ["Bye"]),
        ({"prompt": "Hi"}, user("Hi"), []),
        ({"instruction": "Add.", "input": "2 and 2"}, user("Add.\n\n2 and 2"), []),
        ({"instruction": "Add.", "input": ""}, user("Add."), []),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Yo"},
                ]
            },
            [SYSTEM, *user("Hi")],
            [],
        ),
    ],
)
def test_layouts(tmp_path: Path, record: dict[str, Any], messages: list[dict[str, str]], turns: list[str]) -> None:
    (prompt,) = load(write(tmp_path / "p.jsonl", [{"id": "one", "source": "mine", **record}]))
    assert prompt.id == "one"
    assert (prompt.messages, prompt.turns) == (messages, turns)
    assert prompt.meta["source"] == "mine"


def test_given_answers_stay(tmp_path: Path) -> None:
    share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    source = write(tmp_path / "p.jsonl", [{"conversations": share}])
    assert load(source, answers="given")[0].messages == user("Hi", "Hello")
    with pytest.raises(ConfigError, match=r"has no answer \(.*q.jsonl:1\)"):
        load(write(tmp_path / "q.jsonl", [{"prompt": "Hi"}]), answers="given")
    with pytest.raises(ConfigError, match="builtin:train has no answers"):
        load("builtin:train", answers="given")


def test_every_kind_of_file_gives_the_same_prompts(tmp_path: Path) -> None:
    records = [
        {"id": f"r{number}", "messages": user(f"Question {number}", "Answer", "More?"), "kind": "x"}
        for number in range(30)
    ]
    plain = write(tmp_path / "p.jsonl", records)
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as stream:
        stream.write(Path(plain).read_text())
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    with fsspec.open("memory://bucket/p.jsonl", "wb") as stream:
        stream.write(Path(plain).read_bytes())
    sources = [
        plain,
        str(tmp_path / "p.jsonl.gz"),
        str(tmp_path / "p.parquet"),
        f"file://{plain}",
        "memory://bucket/p.jsonl",
    ]
    loaded = [load(source, count=20) for source in sources]
    assert len(loaded[0]) == 20
    assert all(prompts == loaded[0] for prompts in loaded)


def test_the_choice_follows_the_seed_and_not_the_order_of_the_file(tmp_path: Path) -> None:
    records = [{"prompt": f"Question {number}"} for number in range(300)]
    shuffled = random.Random(1).sample(records, len(records))
    one, other = write(tmp_path / "a.jsonl", records), write(tmp_path / "b.jsonl", shuffled)
    assert load(one, count=50) == load(other, count=50)
    assert load(one, count=50) == load(one, count=300)[:50]
    assert {p.id for p in load(one, count=50, seed=1)} != {p.id for p in load(one, count=50, seed=2)}


def test_content_names_a_record_without_id(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", [{"prompt": "Hi"}, {"messages": user("Hi")}, {"prompt": "Bye"}])
    assert len({prompt.id for prompt in load(source, count=2)}) == 2
    with pytest.raises(ConfigError, match="has 2 different prompts, fewer than the 3 asked for"):
        load(source, count=3)


def test_one_id_with_two_contents_is_two_prompts(tmp_path: Path) -> None:
    same = [{"id": "a", "prompt": "Hi"}, {"id": "a", "prompt": "Hi"}, {"id": "b", "prompt": "Bye"}]
    assert len(load(write(tmp_path / "p.jsonl", same), count=2)) == 2
    shards = [{"id": number % 10, "prompt": f"Question {number}"} for number in range(30)]
    one = load(write(tmp_path / "q.jsonl", shards), count=30)
    assert one == load(write(tmp_path / "r.jsonl", shards[::-1]), count=30)
    assert len({prompt.id for prompt in one}) == 30
    assert {prompt.id[0] for prompt in one} == set("0123456789")
    assert [prompt.messages for prompt in load(str(tmp_path / "q.jsonl"), count=7)] == [p.messages for p in one[:7]]


def test_a_prompt_in_two_strata_is_taken_once(tmp_path: Path) -> None:
    across = [{"id": "a", "prompt": "Hi", "kind": "x"}, {"id": "a", "prompt": "Hi", "kind": "y"}]
    more = [{"id": "b", "prompt": "Bye", "kind": "y"}]
    assert {p.id for p in load(write(tmp_path / "p.jsonl", across + more), count=2, stratify="kind")} == {"a", "b"}
    with pytest.raises(ConfigError, match="has 0 prompts with kind = 'y', fewer than the 1 asked for"):
        load(write(tmp_path / "q.jsonl", across), count=2, stratify="kind")


def test_the_choice_for_a_clean_file_stays_what_it_was(tmp_path: Path) -> None:
    """Keys of rounds hang on it: recorded before records could be left out."""
    records = [
        {"id": f"r{n}", "messages": user(f"Question {n}", "Answer", "More?"), "kind": "ab"[n % 2]} for n in range(30)
    ]
    named, bare = (
        write(tmp_path / "p.jsonl", records),
        write(tmp_path / "q.jsonl", [{"prompt": f"Q {n}"} for n in range(40)]),
    )
    assert [p.id for p in load(named, count=5)] == PINNED[0]
    assert [p.id for p in load(named, count=5, stratify="kind", seed=3)] == PINNED[1]
    assert [p.id for p in load(bare, count=3)] == PINNED[2]
    assert [prompts_digest(load(named, count=9)), prompts_digest(load(named, count=30, system="Sing."))] == PINNED[3]


def test_strata_have_equal_shares(tmp_path: Path) -> None:
    records = [
        {"prompt": f"{kind} {n}", "kind": kind} for kind, size in (("x", 90), ("y", 9), ("z", 30)) for n in range(size)
    ]
    source = write(tmp_path / "p.jsonl", records)
    assert Counter(prompt.meta["kind"] for prompt in load(source, count=26, stratify="kind")) == {
        "x": 9,
        "y": 9,
        "z": 8,
    }
    with pytest.raises(ConfigError, match=r"has 9 different prompts with kind = 'y', fewer than the 10 asked for"):
        load(source, count=30, stratify="kind")
    with pytest.raises(ConfigError, match=r"has no field 'sort' to stratify by \(.*p.jsonl:1; "):
        load(source, stratify="sort")


def test_system_prompt_only_where_there_is_none(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", [{"id": 1, "prompt": "Hi"}, {"id": 2, "messages": [SYSTEM, *user("Yo")]}])
    prompts = {prompt.id: prompt for prompt in load(source, count=2, system="Sing.")}
    assert prompts["1"].messages == [{"role": "system", "content": "Sing."}, *user("Hi")]
    assert prompts["2"].messages == [SYSTEM, *user("Yo")]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(str(tmp_path / "gone.jsonl"))
    with pytest.raises(ConfigError, match="no known ending"):
        load(str(tmp_path / "p.csv"))
    with pytest.raises(ConfigError, match=r"no prompts\.source 'builtin:test'"):
        load("builtin:test")
    whole = gzip.compress(
        b"".join(json.dumps({"prompt": f"{random.Random(n).random()}"}).encode() + b"\n" for n in range(200))
    )
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cannot be read after .*cut\.jsonl\.gz"):
        load(str(tmp_path / "cut.jsonl.gz"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"bad\.parquet cannot be read"):
        load(str(tmp_path / "bad.parquet"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has 0 prompts"):
        load(str(tmp_path / "empty.jsonl"))


def test_builtin_source() -> None:
    assert len(load("builtin:train", count=40)) == 40
    assert load("builtin:heldout", system="Be brief.")[0].messages[0] == SYSTEM


def test_next_prompt_turn_by_turn() -> None:
    prompt = Prompt("p", [SYSTEM, *user("One")], ["Two", "Three"])
    assert next_prompt(prompt, []) == [SYSTEM, *user("One")]
    assert next_prompt(prompt, ["A", "B"]) == [SYSTEM, *user("One", "A", "Two", "B", "Three")]
    with pytest.raises(ValueError, match="prompt p has 3 turns"):
        next_prompt(prompt, ["A", "B", "C"])


def test_digest_sees_ids_and_content_but_not_order() -> None:
    one, other = Prompt("a", user("Hi")), Prompt("b", user("Bye"))
    assert prompts_digest([one, other]) == prompts_digest([other, one])
    changed = [Prompt("a", user("Hi!")), Prompt("c", user("Hi")), Prompt("a", user("Hi"), ["More"])]
    assert len({prompts_digest([prompt]) for prompt in (one, *changed)}) == 4


def test_a_source_whose_library_has_errors_of_its_own_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"s3://none/p\.jsonl cannot be read"):
        load("s3://none/p.jsonl")
