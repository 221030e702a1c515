"""A round that is run again with other settings: what of it is still needed, whatever its pointers say."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from standin.stored_round import finish, offered_beside, staying
from standin.stored_round import offered as offered_by_itself

from infra.config.load import build_round, load_round, round_file
from infra.config.round import RetentionConfig
from infra.disk.retention import policies
from infra.round.context import RoundContext
from infra.round.states import make_live
from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore

FREE = RetentionConfig(states="until_published", earlier_rounds=True, stale_generations=True)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}")


def start(rounds: RoundStore, retention: dict[str, Any] | None = None, **keys: str) -> None:
    """As preflight writes it when the round starts."""
    made = {"samples": "s1", "hidden": "h1", "draft": "d1", "eval": "e1", "published": "p1", "report": "r1", **keys}
    rounds.write_provenance({"round": {"retention": retention or {}}, "keys": made})


def extracted(rounds: RoundStore, key: str, size: int = 10) -> None:
    rounds.store.put(f"{rounds.step_prefix('hidden', key)}/00000/states", b"y" * size)


def verified(rounds: RoundStore, key: str, samples: str = "s1") -> None:
    """As the verify step does it."""
    extracted(rounds, key)
    config = build_round(load_round(round_file("smoke")).model_dump(mode="json"), {})
    context = SimpleNamespace(
        rounds=rounds,
        config=config,
        keys=SimpleNamespace(hidden=key, samples=samples),
        target=SimpleNamespace(revision="r"),
        versions={"vllm": "0.32.0"},
    )
    make_live(cast(RoundContext, context))


def offered(store: ObjectStore, name: str = "one") -> list[str]:
    found = [item.path for item in offered_by_itself(store, name, FREE)]
    assert [item.path for item in offered_beside(store, "another", FREE)] == found
    return found


def test_states_of_a_published_round_stay_while_it_is_run_again_with_another_training(store: ObjectStore) -> None:
    rounds = finish(store, "one")
    start(rounds)
    assert offered(store) == ["rounds/one/hidden/h1"]
    start(rounds, draft="d2", eval="e2", published="p2")
    assert offered(store) == []
    [why] = [item.why for item in staying(store, "one", FREE) if item.path == "rounds/one/hidden/h1"]
    assert "the last start of the round is for them" in why
    for step, key, made in (("draft", "d2", {"hidden": "h1"}), ("eval", "e2", {"draft": "d2"})):
        rounds.point(step, key, made)
        assert offered(store) == []
    rounds.point("published", "p2", {"draft": "d2"})
    assert offered(store) == ["rounds/one/hidden/h1"]


def test_a_superseded_generation_stays_while_the_round_is_back_at_it(store: ObjectStore) -> None:
    rounds = finish(store, "one")
    verified(rounds, "h2")
    assert offered(store) == ["rounds/one/hidden/h1"]
    start(rounds, draft="d3", published="p3")
    assert offered(store) == []


def test_a_round_that_was_finished_before_another_was_published_wants_nothing(store: ObjectStore) -> None:
    rounds = finish(store, "one", hidden={"samples": "s1", "supersedes": ["h0"]})
    extracted(rounds, "h0")
    start(rounds, hidden="h0", published="p0", report="r0")
    assert offered(store) == ["rounds/one/hidden/h1"]
    store.put(f"{rounds.step_prefix('report', 'r0')}/report.json", b"{}")
    assert offered(store) == ["rounds/one/hidden/h0", "rounds/one/hidden/h1"]


def test_a_trial_with_other_samples_supersedes_only_what_was_published(store: ObjectStore) -> None:
    rounds = RoundStore(store, "one")
    verified(rounds, "main")
    extracted(rounds, "half-made")
    verified(rounds, "trial", samples="s2")
    assert offered(store) == []
    [why] = [item.why for item in staying(store, "one", FREE) if item.path == "rounds/one/hidden/main"]
    assert "nothing was published of them" in why
    done = finish(store, "two")
    verified(done, "h2", samples="s2")
    assert offered(store, "two") == ["rounds/two/hidden/h1"]


def test_what_was_superseded_stays_so_over_generations(store: ObjectStore) -> None:
    rounds = RoundStore(store, "one")
    for key in ("first", "second", "third"):
        verified(rounds, key)
    assert offered(store) == ["rounds/one/hidden/first", "rounds/one/hidden/second"]


def test_policies_let_go_what_the_file_and_the_last_start_both_do(store: ObjectStore) -> None:
    config = build_round(load_round(round_file("smoke")).model_dump(mode="json"), {"retention": FREE.model_dump()})
    rounds = RoundStore(store, "smoke")
    assert policies(store, [config]) == {"smoke": FREE}
    start(rounds, {"states": "keep"})
    assert policies(store, [config])["smoke"].states == "keep"
    start(rounds, {"stale_generations": False})
    assert policies(store, [config])["smoke"] == FREE.model_copy(update={"stale_generations": False})
    store.put("rounds/smoke/round.yaml", b"{")
    assert policies(store, [config])["smoke"].states == "keep"


def test_another_round_keeps_the_generations_that_its_own_policy_keeps(store: ObjectStore) -> None:
    rounds = finish(store, "one", draft={"hidden": "h0"})
    verified(rounds, "h2")
    start(rounds, {"stale_generations": False})
    assert offered_beside(store, "another", FREE) == []
    start(rounds)
    assert [item.path for item in offered_beside(store, "another", FREE)] == ["rounds/one/hidden/h1"]


def test_states_of_a_round_whose_provenance_is_damaged_stay(store: ObjectStore) -> None:
    finish(store, "one")
    store.put("rounds/one/round.yaml", b"{")
    assert offered(store) == []
