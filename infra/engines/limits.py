"""What no engine can do of what is asked of it, as far as target, flags and versions tell.

One function a limit: it takes a :class:`Use` and gives a sentence, or None. What one engine alone cannot do is in its
folder, as its ``limits``. The plan, preflight and doctor ask both for a whole round (:mod:`infra.round.checks`); the
engines ask again at launch.
"""

from infra.engines.engine import Engine, Limit, Use
from infra.engines.launch import LaunchRequest, staging_of
from infra.errors import EngineError
from infra.targets.target import Target, read_json
from infra.targets.text import outer_family

LATENT_ATTENTION = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"})
"""Families (``model_type``) with latent attention, which engines cannot run or capture everywhere."""


def layers_are_known(use: Use) -> str | None:
    """The layer ids for the taps: of what is captured, and of what a draft is fed while it serves."""
    if not (use.captures or use.drafts) or not use.taps:
        return None
    if use.taps[-1] >= use.shape.layers:
        return f"tap {use.taps[-1]} does not exist: {use.name} has {use.shape.layers} layers"
    try:
        use.engine.numbering.ids(use.version, use.shape.family, use.taps, use.shape.layers)
    except EngineError as error:
        return str(error)
    return None


def part_of_a_whole(use: Use) -> str | None:
    """A language model inside another model, whose class must hand the captured layers on."""
    if use.target is None or not (use.captures or use.drafts):
        return None
    if (fault := wrapper_fault(use.engine, use.target)) is None:
        return None
    return (
        f"{fault}. Expected: a language model alone, or one of {', '.join(sorted(use.engine.wrappers))}. To mend it: "
        "read the engine's class of this target, and add its family to WRAPPERS in "
        f"infra/engines/{use.engine.name}/limits.py"
    )


def wrapper_fault(engine: Engine, target: Target) -> str | None:
    """Why an engine may not capture the layers of a language model inside another model; None where it can."""
    outer = outer_family(target.path)
    if not outer or outer in engine.wrappers:
        return None
    return f"{engine.name} is not known to capture layers of the language model inside the {outer} target {target.name}"


def heads_divide(use: Use) -> str | None:
    """Tensor parallelism gives every GPU as many attention heads."""
    heads, parts = getattr(use.text, "num_attention_heads", None), use.config.tensor_parallel
    engine = use.engine.name
    if heads and heads % parts:
        return (
            f"{engine} cannot split the {heads} attention heads of {use.name} over {parts} GPUs. To mend it: set "
            f"engines.{engine}.tensor_parallel to a divisor of {heads}"
        )
    return None


def mxfp4_wants_bfloat16(use: Use) -> str | None:
    """Its kernels take no other activations (vLLM 0.32.0, quantization/mxfp4.py)."""
    stored = read_json(use.target.path / "config.json").get("quantization_config") if use.target is not None else None
    dtype = use.config.dtype
    if isinstance(stored, dict) and stored.get("quant_method") == "mxfp4" and dtype not in ("bfloat16", "auto"):
        return (
            f"{use.name} has MXFP4 weights, which run in bfloat16. To mend it: set engines.{use.engine.name}.dtype: "
            "bfloat16"
        )
    return None


LIMITS: tuple[Limit, ...] = (layers_are_known, part_of_a_whole, heads_divide, mxfp4_wants_bfloat16)


def beyond(use: Use) -> list[str]:
    """Every limit that the use goes beyond, a sentence each."""
    return [said for limit in (*LIMITS, *use.engine.limits) if (said := limit(use))]


def check_launch(engine: Engine, version: str, request: LaunchRequest) -> None:
    """Refuse what the engine cannot do, before minutes are spent on it.

    Raises:
        EngineError: naming every limit.
    """
    if request.profile == "extract":
        staging_of(request)
    if found := beyond(Use.of(engine, version, request)):
        raise EngineError("; ".join(found))
