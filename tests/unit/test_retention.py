"""Retention offers only what can be made again, and says why."""

from pathlib import Path
from typing import Any

import pytest
from standin.stored_round import finish, offered, offered_beside, staying

from infra.config.round import RetentionConfig
from infra.disk.item import remove
from infra.store.objects import ObjectStore

FREE = RetentionConfig(states="until_published", earlier_rounds=True, stale_generations=True)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}")


def paths(store: ObjectStore, name: str, policy: RetentionConfig) -> list[str]:
    return [item.path for item in offered_beside(store, name, policy)]


def test_states_of_a_published_draft_go_and_nothing_else(store: ObjectStore) -> None:
    finish(store, "one")
    found = offered_beside(store, "one", FREE)
    assert [(item.path, item.bytes) for item in found] == [("rounds/one/hidden/h1", 1000)]
    assert "samples are kept" in found[0].why
    assert remove(store, found) == 1000
    assert store.list("rounds/one/hidden/h1") == []
    assert store.list("rounds/one/samples") != []
    assert offered_beside(store, "one", FREE) == []


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("hidden", {"samples": "other"}),
        ("draft", {"hidden": "other"}),
        ("eval", {"draft": "other"}),
        ("published", {"draft": "other"}),
    ],
)
def test_states_stay_while_any_step_is_of_something_else(store: ObjectStore, step: str, says: dict[str, Any]) -> None:
    finish(store, "one", **{step: says})
    assert offered_beside(store, "one", FREE) == []


def test_states_stay_when_their_samples_are_damaged(store: ObjectStore) -> None:
    finish(store, "one")
    part = next(item.path for item in store.list("rounds/one/samples/s1") if "part" in item.path)
    store.put(part, b"spoilt")
    assert offered_beside(store, "one", FREE) == []


def test_the_policy_decides_about_own_and_earlier_rounds(store: ObjectStore) -> None:
    finish(store, "one")
    finish(store, "two")
    assert paths(store, "two", RetentionConfig(states="keep", earlier_rounds=True)) == ["rounds/one/hidden/h1"]
    assert paths(store, "two", RetentionConfig(states="until_published")) == ["rounds/two/hidden/h1"]
    assert paths(store, "two", RetentionConfig(states="keep")) == []
    assert paths(store, "two", FREE) == ["rounds/one/hidden/h1", "rounds/two/hidden/h1"], "earlier rounds go first"
    assert [item.path for item in offered(store, "one", FREE)] == ["rounds/one/hidden/h1"]
    assert offered(store, "two", RetentionConfig(states="keep", earlier_rounds=True)) == []


def test_a_superseded_generation_goes_once_the_new_one_is_live(store: ObjectStore) -> None:
    rounds = finish(store, "one", draft={"hidden": "h0"}, hidden={"samples": "s1", "supersedes": ["h0"]})
    for key in ("h0", "being-made"):
        store.put(f"{rounds.step_prefix('hidden', key)}/00000/states", b"y" * 10)
    assert paths(store, "one", FREE) == ["rounds/one/hidden/h0"]
    assert paths(store, "one", RetentionConfig(stale_generations=False)) == []


@pytest.mark.parametrize("step", ["samples", "hidden", "published"])
def test_a_damaged_pointer_of_one_round_keeps_its_states_and_stops_no_other(step: str, store: ObjectStore) -> None:
    finish(store, "one")
    finish(store, "two")
    store.put(f"rounds/one/{step}/current.json", b"{")
    assert paths(store, "two", FREE) == ["rounds/two/hidden/h1"]
    assert offered(store, "one", FREE) == []
    [why] = [item.why for item in staying(store, "one", FREE) if item.path == "rounds/one/hidden/h1"]
    assert f"rounds/one/{step}/current.json is damaged" in why
