"""What rows of errors say: right, off by some layers, swapped, after the norm, or nothing known."""

import pytest

from infra.gates.layer_errors import explain, tap_seen

LAYERS = 8
ASKED = (1, 3, 6, 8)


def row(tap: int, error: float = 0.01) -> tuple[float, ...]:
    """Errors of a slot that holds a tap: the further away, the larger."""
    return tuple(error if tap == other else 0.3 * abs(tap - other) for other in range(LAYERS + 1))


FOREIGN = (1.2,) * (LAYERS + 1)


def said(rows: list[tuple[float, ...]], post_norm: float = 1.0) -> str:
    return "; ".join(text for _, text in explain(ASKED, rows, post_norm, "vllm 0.32.0", "pre_norm"))


def test_the_right_taps_have_nothing_wrong() -> None:
    assert said([row(tap) for tap in ASKED]) == ""


@pytest.mark.parametrize(
    ("captured", "sentence"),
    [
        ((2, 4, 7, 8), "captured taps 2, 4, 7 where 1, 3, 6 were asked: ids are off by +1 for engine vllm 0.32.0"),
        ((1, 2, 6, 8), "captured tap 2 where 3 was asked: ids are off by -1 for engine vllm 0.32.0"),
        ((1, 3, 6, 7), "captured tap 7 where 8 was asked: ids are off by -1 for engine vllm 0.32.0"),
        ((0, 4, 6, 8), "captured taps 0, 4 where 1, 3 were asked: ids are off by -1 and +1 for engine vllm 0.32.0"),
        ((1, 6, 3, 8), "taps 3 and 6 are swapped"),
        ((6, 1, 3, 8), "taps 1, 3, 6 came in the order 6, 1, 3"),
    ],
)  # fmt: skip
def test_other_layers_are_named(captured: tuple[int, ...], sentence: str) -> None:
    assert said([row(tap) for tap in captured]) == sentence


def test_a_state_after_the_norm_is_named() -> None:
    rows = [*(row(tap) for tap in ASKED[:-1]), FOREIGN]
    assert said(rows, post_norm=0.01) == "the final state is post-norm where pre-norm was expected"
    assert said(rows).startswith("the final state is no layer of the reference: the nearest is tap 0, with a median")


def test_a_match_with_nothing_is_said() -> None:
    rows = [row(1), FOREIGN, row(6), row(8)]
    assert (
        said(rows)
        == "what came as tap 3 is no layer of the reference: the nearest is tap 0, with a median error of 1.2"
    )


@pytest.mark.parametrize(("error", "seen"), [(0.059, 3), (0.061, None)])
def test_the_bound_is_a_fifth_of_the_distance_to_the_nearer_neighbour(error: float, seen: int | None) -> None:
    assert tap_seen(row(3, error)) == seen
