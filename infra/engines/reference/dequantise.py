"""Quantised weights as plain numbers, for the reference: the two formats that very large targets are published in."""

from typing import Any

import torch

from infra.errors import EngineError

QUANTISED = {"weight_packed": 8}
"""Weights that one stored number stands for, by the last part of a tensor's name."""
_SIDE = ("weight_scale", "weight_shape", "weight_zero_point", "weight_scale_inv", "weight_g_idx")


def dequantised(tensors: dict[str, torch.Tensor], quantization: Any) -> dict[str, torch.Tensor]:
    """The tensors of a part with every quantised weight under its plain name, bfloat16; others as they are.

    Known are compressed-tensors' ``pack-quantized`` (symmetric, 4 bits, by group or channel: Kimi-K2.5 INT4) and FP8
    in blocks with ``weight_scale_inv`` (DeepSeek-V3).

    Args:
        tensors: by name, as the files have them.
        quantization: config.json's ``quantization_config``; None for a plain target.

    Raises:
        EngineError: quantised in another way.
    """
    plain = {name: tensor for name, tensor in tensors.items() if name.rsplit(".", 1)[-1] not in (*_SIDE, *QUANTISED)}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "weight_packed":
            plain[f"{stem}.weight"] = unpack_int4(tensor, tensors, stem, quantization)
        elif last == "weight_scale_inv":
            plain[f"{stem}.weight"] = scale_blocks(tensors[f"{stem}.weight"], tensor, quantization)
    unknown = [name for name, tensor in plain.items() if not tensor.is_floating_point() or tensor.itemsize == 1]
    if unknown:
        kind = (quantization or {}).get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise EngineError(f"its weights are quantised ({kind}) in a way the reference does not read: {unknown[0]}")
    return plain


def unpack_int4(packed: torch.Tensor, tensors: dict[str, torch.Tensor], stem: str, quantization: Any) -> torch.Tensor:
    """bfloat16 [out, in] of int32 [out, in / 8]: eight values of 4 bits a number, lowest bits first, offset by 8.

    Source: compressed-tensors, ``compressors/pack_quantized`` (``unpack_from_int32``).

    Raises:
        EngineError: another width, or zero points.
    """
    groups = (quantization or {}).get("config_groups", {}).values()
    widths = {int(group["weights"]["num_bits"]) for group in groups if group.get("weights")}
    if packed.dtype is not torch.int32 or widths != {4} or f"{stem}.weight_zero_point" in tensors:
        raise EngineError(
            f"{stem} is packed as {packed.dtype} of {sorted(widths)} bits, or with zero points: the reference reads "
            "symmetric 4-bit integers only"
        )
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = ((packed.unsqueeze(-1) >> shifts) & 0xF).flatten(1) - 8
    rows, columns = (int(size) for size in tensors[f"{stem}.weight_shape"])
    scale = tensors[f"{stem}.weight_scale"].float()
    wide = scale.repeat_interleave(-(-columns // scale.shape[1]), dim=1)[:, :columns]
    return (values[:rows, :columns].float() * wide).to(torch.bfloat16)


def scale_blocks(weight: torch.Tensor, scale: torch.Tensor, quantization: Any) -> torch.Tensor:
    """bfloat16 [out, in] of an FP8 weight with one factor a block (128 x 128 unless the config says otherwise)."""
    high, wide = (quantization or {}).get("weight_block_size") or (128, 128)
    factors = scale.float().repeat_interleave(high, 0).repeat_interleave(wide, 1)
    return (weight.float() * factors[: weight.shape[0], : weight.shape[1]]).to(torch.bfloat16)
