"""What becomes of every file in tests/cases/data: read rightly, some of it left out, or refused in one sentence."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.config.round import PromptsConfig
from infra.data.layouts import Answers
from infra.data.prompts import load_prompts
from infra.data.tally import Tally
from infra.errors import ConfigError

DATA = Path(__file__).parents[1] / "cases" / "data"


@dataclass(frozen=True)
class Fate:
    """Prompts that are read, the roles of the first one's messages, its later turns, and what is not used by kind.

    ``refused`` is what the one sentence says where nothing is read.
    """

    prompts: int = 0
    roles: str = ""
    later: int = 0
    left_out: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    refused: str = ""


def refused(text: str) -> Fate:
    return Fate(refused=text)


NO_ANSWER = refused("has no answer")
TOOLS = "what follows a call of a tool"
ORPHAN, OTHERS = "replies to a message that is not there", "its other replies"
SYSTEM = "what follows a system message in the middle"
CASES: dict[str, tuple[Fate, Fate]] = {
    # file: (answers: target, answers: given)
    "binary-id.parquet": (Fate(2, "u"), NO_ANSWER),
    "bom-crlf.jsonl": (Fate(4, "u"), NO_ANSWER),
    "cut.jsonl": (refused("cut.jsonl:21 is not JSON (unterminated string starting at), and the file ends there"),) * 2,
    "cut.jsonl.gz": (refused("cannot be read after"),) * 2,
    "float-ids.parquet": (Fate(4, "u"), NO_ANSWER),
    "held-in-data.json": (Fate(20, "u"), Fate(20, "ua")),
    "ids-restart-per-shard.jsonl": (Fate(3, "u"), NO_ANSWER),
    "hh-rlhf.jsonl": (Fate(20, "u", later=1), Fate(20, "uaua")),
    "lines-named.json": (Fate(20, "u"), Fate(20, "ua")),
    "lmsys-conversation-singular.jsonl": (Fate(5, "u"), Fate(5, "ua")),
    "magpie-layout.parquet": (Fate(10, "u"), Fate(10, "ua")),
    "map.parquet": (Fate(1, "u"), Fate(1, "ua")),
    "messages-as-json-text.parquet": (Fate(10, "u"), Fate(10, "ua")),
    "mtbench.jsonl": (Fate(8, "u", later=1), NO_ANSWER),
    "null-first.parquet": (Fate(1, "u"), NO_ANSWER),
    "number-prompt.jsonl": (refused("has a question that is not text"), NO_ANSWER),
    "oasst-rows.jsonl": (
        Fate(20, "u", left_out=(ORPHAN,), without=(OTHERS,)),
        Fate(20, "ua", left_out=(ORPHAN,), without=(OTHERS,)),
    ),
    "oasst-trees.jsonl": (Fate(20, "u", without=(OTHERS,)), Fate(20, "ua", without=(OTHERS,))),
    "openai-developer-role.jsonl": (Fate(20, "su"), Fate(20, "sua")),
    "openai-image-part.jsonl": (refused("has a question with parts that are not text"),) * 2,
    "openai-reasoning-content.jsonl": (Fate(20, "u"), refused("has reasoning in a field of its own")),
    "openai-tool-calls-null-content.jsonl": (
        Fate(21, "u", without=(TOOLS,)),
        Fate(20, "ua", left_out=("has calls of tools",)),
    ),
    "openai-two-questions-in-a-row.jsonl": (Fate(20, "u", later=1), Fate(20, "uua")),
    "parts.parquet": (Fate(1, "u"), Fate(1, "ua")),
    "preference-prompt-messages.jsonl": (Fate(5, "u"), Fate(5, "ua")),
    "sharegpt-array-named.jsonl": (Fate(20, "u"), Fate(20, "ua")),
    "sharegpt-array.json": (Fate(20, "u"), Fate(20, "ua")),
    "sharegpt-blank-answer.jsonl": (Fate(21, "u"), Fate(20, "ua", left_out=("has an answer that is blank",))),
    "sharegpt-chatgpt-speaker.jsonl": (Fate(21, "u"), Fate(21, "ua")),
    "sharegpt-empty-conversation.jsonl": (
        Fate(20, "u", left_out=("has an empty `conversations`",)),
        Fate(20, "ua", left_out=("has an empty `conversations`",)),
    ),
    "sharegpt-empty-system.jsonl": (Fate(20, "u"), Fate(20, "ua")),
    "sharegpt-ends-with-human.jsonl": (Fate(21, "u"), Fate(20, "ua", left_out=("does not end with an answer",))),
    "sharegpt-starts-with-gpt.jsonl": (
        Fate(20, "u", left_out=("begins with an answer",)),
        Fate(20, "ua", left_out=("begins with an answer",)),
    ),
    "sharegpt-system-in-the-middle.jsonl": (
        Fate(21, "u", without=(SYSTEM,)),
        Fate(20, "ua", left_out=("has a system message in the middle",)),
    ),
    "sharegpt-tool-observation.jsonl": (
        Fate(21, "u", without=(TOOLS,)),
        Fate(20, "ua", left_out=("has calls of tools",)),
    ),
    "sharegpt-two-answers-in-a-row.jsonl": (Fate(21, "u"), Fate(20, "ua", left_out=("has two answers in a row",))),
    "some-null-prompts.jsonl": (Fate(7, "u", left_out=("has an empty `prompt`",)), NO_ANSWER),
    "specforge-conversations-role-content.jsonl": (Fate(20, "u"), Fate(20, "ua")),
    "struct-nulls.parquet": (Fate(1, "u"), Fate(1, "ua")),
    "u2028.jsonl": (Fate(1, "u"), NO_ANSWER),
    "ultrachat-layout.parquet": (Fate(10, "u", later=1), Fate(10, "uaua")),
    "upper.JSONL": (Fate(1, "u"), NO_ANSWER),
}


def test_the_table_knows_every_file() -> None:
    assert sorted(CASES) == sorted(path.name for path in DATA.iterdir())


@pytest.mark.parametrize("answers", ["target", "given"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_becomes_of_a_file(name: str, answers: Answers) -> None:
    fate = CASES[name][answers == "given"]
    config = PromptsConfig(source=str(DATA / name), count=max(1, fate.prompts))
    tally = Tally()
    if fate.refused:
        with pytest.raises(ConfigError) as caught:
            load_prompts(config, answers, tally=tally)
        assert name in str(caught.value)
        assert fate.refused in str(caught.value)
        return
    prompts = load_prompts(config, answers, tally=tally)
    assert tally.read == fate.prompts + sum(kind.count for kind in tally.left_out.values())
    assert (tuple(tally.left_out), tuple(tally.without)) == (fate.left_out, fate.without)
    clean = [prompt for prompt in prompts if prompt.id not in ("call", "open", "sys", "tool")]
    assert {"".join(message["role"][0] for message in prompt.messages) for prompt in clean} == {fate.roles}
    assert {len(prompt.turns) for prompt in clean} == {fate.later}
    assert len({prompt.id for prompt in prompts}) == len(prompts) == fate.prompts
    for place in (place for kind in (*tally.left_out.values(), *tally.without.values()) for place in kind.examples):
        assert place.startswith(f"{DATA / name}:")
