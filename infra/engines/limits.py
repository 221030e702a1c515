"""What an engine cannot do of what is asked of it, as far as target, flags and versions tell.

One function a limit: it takes a :class:`Use` and gives a sentence, or None. A new one goes into :data:`LIMITS`. The
plan, preflight and doctor ask them for a whole round (:mod:`infra.round.checks`); the engines ask them again at launch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from transformers import PretrainedConfig

from infra.config.round import EngineConfig, TargetShape
from infra.engines.launch import MLA_FAMILIES, LaunchRequest
from infra.engines.layer_ids import engine_layer_ids
from infra.errors import ConfigError, EngineError
from infra.targets.final_norm import read_final_norm
from infra.targets.target import Target, read_json
from infra.targets.text import open_text, outer_family

WRAPPERS = {"vllm": frozenset({"mistral3", "kimi_k25"}), "sglang": frozenset({"kimi_k25"})}
"""By engine: ``model_type`` of targets of several parts whose language model it can capture. Read in vLLM 0.32.0
(classes that are ``SupportsEagle3``) and in SGLang 0.5.14 and 0.5.23 (``set_eagle3_layers_to_capture``)."""


@dataclass(frozen=True)
class Use:
    """One engine and what it is to do.

    Args:
        engine: its name.
        version: its version.
        config: how the round runs it.
        name: the target's name.
        shape: its shape.
        target: the target; None while it is not on this machine.
        taps: taps to capture, or that the draft is fed; ascending.
        captures: whether it gives hidden states.
        drafts: whether it serves with a draft.
    """

    engine: str
    version: str
    config: EngineConfig
    name: str
    shape: TargetShape
    target: Target | None
    taps: tuple[int, ...]
    captures: bool
    drafts: bool

    @classmethod
    def of(cls, engine: str, version: str, request: LaunchRequest) -> "Use":
        """What a launch asks for."""
        target, here = request.target, (request.target.path / "config.json").is_file()
        captures, drafts = request.profile == "extract", request.draft is not None
        return cls(
            *(engine, version, request.config, target.name, target.shape, target if here else None),
            *(request.taps, captures, drafts),
        )

    @cached_property
    def text(self) -> PretrainedConfig | None:
        """The config of the target's language model; None while it is not here, or where transformers has no class."""
        try:
            return open_text(self.target.path) if self.target is not None else None
        except ConfigError:
            return None


def layers_are_known(use: Use) -> str | None:
    """The layer ids for the taps: of what is captured, and of what a draft is fed while it serves."""
    if not (use.captures or use.drafts) or not use.taps:
        return None
    if use.taps[-1] >= use.shape.layers:
        return f"tap {use.taps[-1]} does not exist: {use.name} has {use.shape.layers} layers"
    try:
        engine_layer_ids(use.engine, use.version, use.shape.family, use.taps, use.shape.layers)
    except EngineError as error:
        return str(error)
    return None


def vllm_captures_no_latent_attention(use: Use) -> str | None:
    """Its connector looks for key-value groups that latent attention does not have (read in 0.32.0)."""
    if use.engine == "vllm" and use.captures and use.shape.family in MLA_FAMILIES:
        return (
            f"vLLM cannot extract hidden states of the {use.shape.family} target {use.name}: its connector does not "
            "support targets with latent attention (read in 0.32.0). To mend it: extract and serve with sglang"
        )
    return None


def part_of_a_whole(use: Use) -> str | None:
    """A language model inside another model, whose class must hand the captured layers on."""
    if use.target is None or not (use.captures or use.drafts):
        return None
    if (fault := wrapper_fault(use.engine, use.target)) is None:
        return None
    return (
        f"{fault}. Expected: a language model alone, or one of {', '.join(sorted(WRAPPERS[use.engine]))}. To mend it: "
        "read the engine's class of this target, and add its family to WRAPPERS in infra/engines/limits.py"
    )


def wrapper_fault(engine: str, target: Target) -> str | None:
    """Why an engine may not capture the layers of a language model inside another model; None where it can."""
    outer = outer_family(target.path)
    if not outer or outer in WRAPPERS[engine]:
        return None
    return f"{engine} is not known to capture layers of the language model inside the {outer} target {target.name}"


def heads_divide(use: Use) -> str | None:
    """Tensor parallelism gives every GPU as many attention heads."""
    heads, parts = getattr(use.text, "num_attention_heads", None), use.config.tensor_parallel
    if heads and heads % parts:
        return (
            f"{use.engine} cannot split the {heads} attention heads of {use.name} over {parts} GPUs. To mend it: set "
            f"engines.{use.engine}.tensor_parallel to a divisor of {heads}"
        )
    return None


def vllm_context(use: Use) -> str | None:
    """vLLM serves no more than the target's own context; SGLang is told to (``_get_and_verify_max_len``, 0.32.0)."""
    longest = getattr(use.text, "max_position_embeddings", None)
    overruled = any("VLLM_ALLOW_LONG_MAX_MODEL_LEN" in rung.env for rung in use.config.ladder)
    if use.engine != "vllm" or not longest or overruled:
        return None
    rope = getattr(use.text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("linear", "dynamic", "ntk"):
        longest = int(longest * (rope.get("factor") or 1.0))
    longest = max(longest, getattr(use.text, "model_max_length", None) or 0)
    if use.config.max_model_len <= longest:
        return None
    return (
        f"engines.vllm.max_model_len is {use.config.max_model_len}, and {use.name} takes {longest} tokens "
        f"(max_position_embeddings). To mend it: set it to {longest} at most"
    )


def sglang_final_norm(use: Use) -> str | None:
    """It gives the final state after the norm only, from which the state before is told by dividing."""
    if use.engine != "sglang" or not use.captures or use.target is None:
        return None
    try:
        read_final_norm(use.target).check_invertible()
    except ConfigError as error:
        return str(error)
    return None


def mxfp4_wants_bfloat16(use: Use) -> str | None:
    """Its kernels take no other activations (vLLM 0.32.0, quantization/mxfp4.py)."""
    stored = read_json(use.target.path / "config.json").get("quantization_config") if use.target is not None else None
    dtype = use.config.dtype
    if isinstance(stored, dict) and stored.get("quant_method") == "mxfp4" and dtype not in ("bfloat16", "auto"):
        return (
            f"{use.name} has MXFP4 weights, which run in bfloat16. To mend it: set engines.{use.engine}.dtype: bfloat16"
        )
    return None


def sglang_cpu_latent_attention(use: Use) -> str | None:
    """Its kernels for latent attention want AMX or a GPU (run, 0.5.23)."""
    if use.engine == "sglang" and use.config.device == "cpu" and use.shape.family in MLA_FAMILIES:
        return f"SGLang cannot serve the {use.shape.family} target {use.name} on a CPU. To mend it: use a GPU"
    return None


def sglang_cpu_tensor_parallel(use: Use) -> str | None:
    """Its CPU engine runs in one process here (run, 0.5.23)."""
    if use.engine == "sglang" and use.config.device == "cpu" and use.config.tensor_parallel > 1:
        return "SGLang cannot split a target over several CPUs. To mend it: set engines.sglang.tensor_parallel to 1"
    return None


def sglang_cpu_draft(use: Use) -> str | None:
    """The kernels that verify drafts are in no wheel (read in 0.5.23)."""
    if use.engine == "sglang" and use.config.device == "cpu" and use.drafts:
        return (
            "SGLang cannot serve an EAGLE-3 draft on the CPU (its draft backend wants kernels that no wheel has). "
            "To mend it: set serve_with: vllm, or engines.sglang.device: cuda"
        )
    return None


LIMITS: tuple[Callable[[Use], str | None], ...] = (
    layers_are_known,
    vllm_captures_no_latent_attention,
    part_of_a_whole,
    heads_divide,
    vllm_context,
    sglang_final_norm,
    mxfp4_wants_bfloat16,
    sglang_cpu_latent_attention,
    sglang_cpu_tensor_parallel,
    sglang_cpu_draft,
)


def beyond(use: Use) -> list[str]:
    """Every limit that the use goes beyond, a sentence each."""
    return [said for limit in LIMITS if (said := limit(use))]


def check_launch(engine: str, version: str, request: LaunchRequest) -> None:
    """Refuse what the engine cannot do, before minutes are spent on it.

    Raises:
        EngineError: naming every limit.
    """
    if request.profile == "extract" and request.staging is None:
        raise EngineError("an extract server was asked for without a staging folder")
    if found := beyond(Use.of(engine, version, request)):
        raise EngineError("; ".join(found))
