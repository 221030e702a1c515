"""SGLang's native interface (read in 0.5.14, 0.5.17 and 0.5.23, run with the last)."""

import secrets
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from infra.config.sampling import SAMPLING
from infra.engines.client.counters import SpecCounters
from infra.engines.client.dialect import Generation, Piece, RequestRefused, Sampling, StatesFile, check_prompt, ids_of
from infra.engines.sglang.capture import RID_PREFIX, captured
from infra.errors import EngineError, ExtractionFault

FINISHED = ("stop", "length")
ALL = -1
"""SGLang's ``top_k`` for no bound; it refuses 0."""


class SglangDialect:
    """``/generate`` with ``input_ids``, and ``/tokenize``; each answer's ``meta_info`` has its own counters."""

    completions = "/generate"
    tokenize = "/tokenize"
    counters: str | None = None

    def completion(self, prompt_ids: Sequence[int], sampling: Sampling, *, stream: bool = False) -> dict[str, Any]:
        """See :class:`~infra.engines.client.dialect.Dialect`.

        The seed counts only in a server with ``--enable-deterministic-inference``.
        """
        values = {name: getattr(sampling, name) for name in SAMPLING} | {
            "max_new_tokens": sampling.max_tokens,
            "top_k": sampling.top_k or ALL,
            "sampling_seed": sampling.seed,
        }
        return {
            "input_ids": list(prompt_ids),
            "sampling_params": values,
            "return_prompt_token_ids": True,
            "stream": stream,
        }

    def answer(self, prompt_ids: Sequence[int], reply: Mapping[str, Any]) -> Generation:
        """See :class:`~infra.engines.client.dialect.Dialect`."""
        check_prompt(prompt_ids, reply.get("prompt_token_ids"))
        finish = _finish(reply)
        if not finish:
            raise EngineError(f"the engine answered without a finish reason: {str(reply)[:200]}")
        return Generation(ids_of(reply, "output_ids"), finish, list(prompt_ids))

    def piece(self, event: Mapping[str, Any], known: int) -> Piece:
        """See :class:`~infra.engines.client.dialect.Dialect`.

        Whether an event has all tokens so far or the new ones is a flag of the server (``--incremental-streaming-
        output``); how many there are so far, it always says.
        """
        if "meta_info" not in event:
            raise EngineError(f"the engine's stream broke off: {str(event.get('error', event))[:300]}")
        fresh = int(event["meta_info"]["completion_tokens"]) - known
        ids = ids_of(event, "output_ids")
        return Piece(ids[len(ids) - fresh :] if fresh > 0 else [], _finish(event), event.get("prompt_token_ids"))

    def extraction(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """See :class:`Dialect`; ``rid``, which no other request may have, names the file."""
        return self.completion(token_ids, Sampling(max_tokens=1)) | {"rid": RID_PREFIX + secrets.token_hex(16)}

    def extracted(self, token_ids: Sequence[int], reply: Mapping[str, Any]) -> StatesFile:
        """See :class:`~infra.engines.client.dialect.Dialect`."""
        if reply.get("prompt_token_ids") != list(token_ids):
            raise ExtractionFault(f"the engine worked on other tokens than the {len(token_ids)} it was sent")
        made = captured(reply.get("meta_info") or {})
        return StatesFile(made.path, int(ids_of(reply, "output_ids")[0]), made.layer_ids)

    def chat(self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Dialect`; what is asked for is rendered as for a chat completion."""
        return {"messages": list(messages), "chat_template_kwargs": dict(template_args)}

    def counted(self, text: str) -> SpecCounters | None:
        """See :class:`~infra.engines.client.dialect.Dialect`; there is no page of them."""
        return None

    def share(self, reply: Mapping[str, Any]) -> SpecCounters | None:
        """See :class:`~infra.engines.client.dialect.Dialect`.

        ``spec_correct_drafts_histogram[k]`` is the number of steps that accepted k drafts, the bonus token not counted.
        An answer of one token took no step with a draft.
        """
        counts = reply.get("meta_info") or {}
        steps = int(counts.get("spec_verify_ct", 0))
        if not steps:
            return None
        proposed, by_length = int(counts["spec_num_proposed_drafts"]), counts["spec_correct_drafts_histogram"]
        positions = proposed // steps
        at_least = list(accumulate(reversed(by_length)))[::-1] + [0] * positions
        accepted = int(counts["spec_num_correct_drafts"])
        return SpecCounters(steps, proposed, accepted, tuple(at_least[1 : positions + 1]))


def _finish(reply: Mapping[str, Any]) -> str:
    """The finish reason, or "" when the answer goes on."""
    reason = (reply.get("meta_info") or {}).get("finish_reason")
    if reason is None:
        return ""
    kind, matched = str(reason.get("type")), reason.get("matched")
    if kind in FINISHED and not isinstance(matched, str):
        return kind
    message = f"the engine gave up this answer: {reason.get('message') or matched or reason}"
    raise RequestRefused(message) if reason.get("status_code") == 400 else EngineError(message)
