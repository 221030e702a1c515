"""A machine with a large round, and one step of it in a process of its own: seconds, CPU seconds, peak memory.

``python tests/benchmarks/large.py STEP FOLDER`` measures a step of a machine that :func:`make` filled.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from standin import sample_report
from standin.speculators_draft import draft_config
from standin.tiny import small_round, tiny_target

from infra.config.load import build_round
from infra.config.settings import Settings
from infra.data.prompts import load_prompts
from infra.engines.client.flights import Flights
from infra.round.context import RoundContext
from infra.round.ledger import Ledger
from infra.round.status import look
from infra.steps.generate import Asking, answers_kept, generate
from infra.steps.plan import make_plan
from infra.steps.prepare import prepare
from infra.steps.report import build_report
from infra.store.answers import Answer, AnswerLog

REPOSITORY = Path(__file__).resolve().parents[2]
ANSWER_TOKENS = 150
"""Beside as many of the prompt, tokens."""
TWO_TURNS = 20
"""One conversation in so many has a second turn."""
UNUSABLE = 1000
"""One record in so many is blank."""
VOCABULARY = 32_000
VERSIONS = {"vllm": "0.32.0", "speculators": "0.9.0"}
WORDS = ("tide", "moss", "salt", "lens", "bread", "map", "bell", "rain", "glass", "fern", "kite", "clay", "oar", "wool")


@dataclass(frozen=True)
class Measured:
    """What a step took, and what it found.

    Attributes:
        seconds: of the clock.
        cpu: of all processors, user and system.
        mb: most memory of the process at once (resident), less what it had before the step.
        found: counts and digests, to compare two versions by.
    """

    seconds: float
    cpu: float
    mb: float
    found: dict[str, Any]


def make(folder: Path, lines: int, prompts: int, *, kind: str = "jsonl", answers: bool = False) -> None:
    """Fill a folder with a target, a file of ``lines`` records and a round that takes ``prompts`` of them."""
    (folder / "state").mkdir(parents=True, exist_ok=True)
    source, evaluation = folder / f"prompts.{kind}", folder / "evaluation.jsonl"
    _target(folder / "state" / "models" / small_round(source, evaluation)["target"]["name"])
    evaluation.write_text("".join(json.dumps({"id": f"e{n}", "prompt": f"What is {n}?"}) + "\n" for n in range(4)))
    if kind == "jsonl":
        with source.open("w") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in records(lines))
    else:
        _write_parquet(source, lines)
    fields = small_round(source, evaluation, "large")
    fields["prompts"] |= {"count": prompts, "max_prompt_tokens": 1024}
    fields["prepare"] |= {"max_tokens": 2048}
    fields["generate"] |= {"max_tokens": 200}
    fields["engines"]["vllm"]["max_model_len"] = 4096
    (folder / "round.json").write_text(json.dumps(fields))
    if answers:
        keep_answers(open_round(folder))


def _target(folder: Path) -> None:
    """A tiny target that says it has a vocabulary of usual size: most token ids are objects of their own in Python."""
    tiny_target(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY}))


def records(count: int) -> Iterator[dict[str, Any]]:
    """Conversations of about 140 characters, a few of two turns, a few blank; every tenth with an answer of its own."""
    random = np.random.default_rng(0)
    for number, picks in enumerate(random.integers(len(WORDS), size=(count, 24))):
        text = f"Question {number}: " + " ".join(WORDS[pick] for pick in picks)
        messages = [{"role": "user", "content": "" if number % UNUSABLE == 7 else text}]
        if number % 10 == 0:
            messages.append({"role": "assistant", "content": "It is."})
        if number % TWO_TURNS == 0:
            messages.append({"role": "user", "content": "And why?"})
        yield {"id": f"q{number}", "category": WORDS[picks[0]], "messages": messages}


def _write_parquet(path: Path, lines: int) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema({"id": pa.string(), "category": pa.string(), "messages": pa.list_(message)})
    with pq.ParquetWriter(path, schema) as writer:
        batch = []
        for record in records(lines):
            batch.append(record)
            if len(batch) == 10_000:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                batch = []
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def open_round(folder: Path) -> RoundContext:
    """The round of a folder, whatever engines are here."""
    os.environ |= {"EAGLE3_STATE_DIR": str(folder / "state"), "EAGLE3_ENV_VLLM_CPU": sys.prefix}
    context = RoundContext(build_round(json.loads((folder / "round.json").read_text())), Settings())
    context.__dict__["versions"] = VERSIONS  # of no engine that is here
    return context


def keep_answers(context: RoundContext) -> None:
    """All answers of the round, in parts of 256, not finished."""
    random, letters, all_ids = np.random.default_rng(1), (60, 90), (300, VOCABULARY)
    with AnswerLog(context.store, context.prefix("answers"), context.scratch / "made.jsonl") as log:
        for number, prompt in enumerate(context.prompts, 1):
            answers: list[Answer] = []
            for turn in range(1 + len(prompt.turns)):
                messages: Any = prompt.messages
                if turn:
                    messages = context.history.after(prompt.messages, answers, prompt.turns[:turn])
                assert isinstance(messages, list), messages
                ids = [
                    int(token) for token in random.integers(*(letters if prompt.turns else all_ids), size=ANSWER_TOKENS)
                ] + [context.chat.eos_ids[0]]
                answers.append(
                    Answer(
                        f"{prompt.id}#{turn}", messages, context.chat.render(messages), ids, "stop", "vllm 0.32.0",
                        {"temperature": 0.0}, "ok", turn,
                    )
                )  # fmt: skip
                log.add(answers[-1])
            if number % 256 == 0:
                log.commit()
        log.commit()


class NoEngine:
    """Stands where a client is asked for; nothing is left to be asked of it but how it renders."""

    def __init__(self, context: RoundContext) -> None:
        self._context = context

    def tokenize_chat(self, messages: Any, arguments: Any) -> list[int]:
        return self._context.chat.render(messages, arguments)


def _read(context: RoundContext) -> dict[str, Any]:
    from infra.data.prompts import prompts_digest

    prompts = load_prompts(context.config.prompts)
    return {"prompts": len(prompts), "digest": prompts_digest(prompts), "first": prompts[0].id}


def _plan(context: RoundContext) -> dict[str, Any]:
    plan = make_plan(context)
    left_out = context.left_out["prompts"].left_out_count
    return {"samples": plan.samples, "prompt_tokens": plan.prompt_tokens, "left_out": left_out}


def _resume(context: RoundContext) -> dict[str, Any]:
    kept = answers_kept(context)
    generate(context, Asking(NoEngine(context), Flights()))  # type: ignore[arg-type]
    return {"kept": kept.total() if isinstance(kept, Counter) else len(kept)}


def _prepare(context: RoundContext) -> dict[str, Any]:
    prepare(context)
    manifest = json.loads(context.store.get(f"{context.prefix('samples')}/manifest.json"))
    return {name: manifest[name] for name in ("rows", "train", "heldout", "tokens")}


def _samples(context: RoundContext) -> dict[str, Any]:
    tokens = sum(len(sample.input_ids) for sample in context.samples)
    return {"samples": len(context.samples), "tokens": tokens, "last": sum(context.samples[-1].input_ids)}


def _status(context: RoundContext) -> dict[str, Any]:
    status = look(context)
    return {"done": sorted(status.done), "hidden": status.hidden.why[:40]}


def _report(context: RoundContext) -> dict[str, Any]:
    whole = sample_report.build()
    plan = make_plan(context)
    context.store.put(f"{context.prefix('draft')}/config.json", json.dumps(draft_config()).encode())
    return {"counts": build_report(context, plan, whole.training, whole.evaluation, Ledger()).counts}


STEPS: dict[str, Callable[[RoundContext], dict[str, Any]]] = {
    "read": _read,
    "plan": _plan,
    "resume": _resume,
    "prepare": _prepare,
    "samples": _samples,
    "status": _status,
    "report": _report,
}


def measure(step: str, folder: Path) -> Measured:
    """A step in a fresh process."""
    paths = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))
    command = [sys.executable, str(Path(__file__)), step, str(folder)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(step: str, folder: str) -> None:
    """Do one step, and print what it took."""
    context = open_round(Path(folder))
    _ = context.chat, context.target.revision
    if step not in ("read", "plan"):
        _ = context.keys  # the prompts are read before, not in each step anew
    before, begin, cpu = _peak(), time.perf_counter(), _cpu()
    found = STEPS[step](context)
    seconds, cpu = time.perf_counter() - begin, _cpu() - cpu
    print(json.dumps({"seconds": seconds, "cpu": cpu, "mb": _peak() - before, "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
