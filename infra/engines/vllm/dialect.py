"""vLLM's OpenAI interface in token ids (run with 0.24.0 and 0.32.0)."""

from collections.abc import Mapping, Sequence
from typing import Any

from infra.engines.client.counters import SpecCounters
from infra.engines.client.dialect import Generation, Piece, Sampling, StatesFile, check_prompt, ids_of
from infra.engines.vllm.counters import parse_spec_counters
from infra.errors import EngineError, ExtractionFault


class VllmDialect:
    """``/v1/completions`` with ``return_token_ids``, ``/tokenize`` and ``/metrics``."""

    completions = "/v1/completions"
    tokenize = "/tokenize"
    counters: str | None = "/metrics"

    def completion(self, prompt_ids: Sequence[int], sampling: Sampling, *, stream: bool = False) -> dict[str, Any]:
        """See :class:`~infra.engines.client.dialect.Dialect`."""
        payload = {"prompt": list(prompt_ids), **vars(sampling), "return_token_ids": True}
        return payload | {"stream": True} if stream else payload

    def answer(self, prompt_ids: Sequence[int], reply: Mapping[str, Any]) -> Generation:
        """See :class:`~infra.engines.client.dialect.Dialect`."""
        choice = _choice(reply)
        check_prompt(prompt_ids, choice.get("prompt_token_ids"))
        return Generation(ids_of(choice, "token_ids"), str(choice["finish_reason"]), list(prompt_ids))

    def piece(self, event: Mapping[str, Any], known: int) -> Piece:
        """See :class:`~infra.engines.client.dialect.Dialect`."""
        if not event.get("choices"):
            raise EngineError(f"the engine's stream broke off: {str(event.get('error', event))[:300]}")
        choice = event["choices"][0]
        return Piece(
            ids_of(choice, "token_ids"), choice.get("finish_reason") or "", choice.get("prompt_token_ids") or None
        )

    def extraction(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """See :class:`~infra.engines.client.dialect.Dialect`."""
        return self.completion(token_ids, Sampling(max_tokens=1))

    def extracted(self, token_ids: Sequence[int], reply: Mapping[str, Any]) -> StatesFile:
        """See :class:`~infra.engines.client.dialect.Dialect`."""
        choice = _choice(reply)
        if choice.get("prompt_token_ids") != list(token_ids):
            raise ExtractionFault(f"the engine worked on other tokens than the {len(token_ids)} it was sent")
        path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(path, str):
            raise ExtractionFault(
                "the engine answered without a path of hidden states",
                expected="a server started with profile `extract`",
            )
        return StatesFile(path, int(ids_of(choice, "token_ids")[0]), None)

    def chat(self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`~infra.engines.client.dialect.Dialect`."""
        return {
            "messages": list(messages),
            "add_generation_prompt": True,
            "add_special_tokens": False,
            "chat_template_kwargs": dict(template_args),
        }

    def counted(self, text: str) -> SpecCounters | None:
        """See :class:`~infra.engines.client.dialect.Dialect`."""
        return parse_spec_counters(text)

    def share(self, reply: Mapping[str, Any]) -> SpecCounters | None:
        """See :class:`~infra.engines.client.dialect.Dialect`."""
        return None


def _choice(reply: Mapping[str, Any]) -> dict[str, Any]:
    if not reply.get("choices"):
        raise EngineError(f"the engine answered without choices: {str(reply)[:200]}")
    choice: dict[str, Any] = reply["choices"][0]
    return choice
