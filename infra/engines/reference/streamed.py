"""A target of which one part at a time is in memory: its weights are read when the forward pass comes to them.

The model is built without storage, and the target's own forward pass runs: before a part (embedding, one decoder layer,
final norm, head) computes, its tensors are read from the safetensors files, and after it they are dropped, so
h[k+1] = layer_k(h[k]) needs the memory of one layer.
Written against transformers 5.19 (``core_model_loading.convert_and_load_state_dict_in_model``, which also joins the
experts of a mixture as the model's code wants them).
"""

import json
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from infra.config.json_file import read_json
from infra.engines.reference.dequantise import QUANTISED, dequantised
from infra.errors import EngineError
from infra.targets.target import weight_files
from infra.targets.text import SAME_CODE, text_part

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
OUTER = re.compile(r"^(?:model\.)?language_model\.")
"""Prefix of the text part in the files of a multimodal target."""


class Refused(EngineError):
    """The reference cannot compute this target."""


def part_of(name: str) -> str:
    """The part that a tensor belongs to: ``layers.3``, ``embed_tokens``, ``norm``, ``lm_head`` or ``other``."""
    if match := LAYER.search(name):
        return f"layers.{match[1]}"
    return next((part for part in ("embed_tokens", "lm_head", "norm") if f".{part}." in f".{name}"), "other")


def parts_of(folder: Path) -> dict[str, int]:
    """Number of weights of each part, by the headers of the files; quantised ones are counted as they will be used."""
    counts: dict[str, int] = {}
    for path in weight_files(folder):
        with path.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                packed = QUANTISED.get(name.rsplit(".", 1)[-1], 1)
                counts[part_of(name)] = counts.get(part_of(name), 0) + packed * prod(entry["shape"])
    return counts


def build_streamed(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """A model whose forward pass reads its weights as it goes; fit for one pass.

    Raises:
        Refused: transformers has no code for this family, or the target is quantised in a way that is not known here.
    """
    config = _text_config(folder, trust_remote_code)
    quantization = getattr(config, "quantization_config", None) or _raw(folder).get("quantization_config")
    config.quantization_config = None
    del config.quantization_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()
    except (ValueError, ImportError) as error:
        raise Refused(f"transformers has no code for it: {error}") from error
    _compute_buffers(model)
    files = _Files(folder, quantization)
    loader = _Loader(model, files, dtype)
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    tied = head is not None and "lm_head" not in files.parts
    loader.stream("embed_tokens", decoder.embed_tokens, keep=tied)
    for number, layer in enumerate(decoder.layers):
        loader.stream(f"layers.{number}", layer)
    loader.stream("norm", decoder.norm)
    if tied:
        head.register_forward_pre_hook(lambda module, args: setattr(module, "weight", decoder.embed_tokens.weight))
    else:
        loader.stream("lm_head", head)
    return model


class _Files:
    """The target's weight files, their tensors grouped by part."""

    def __init__(self, folder: Path, quantization: Any) -> None:
        self.parts: dict[str, list[tuple[str, Path]]] = {}
        self._quantization = quantization
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
                    self.parts.setdefault(part_of(name), []).append((name, path))

    def read(self, part: str) -> dict[str, torch.Tensor]:
        """Tensors of one part, by their name in the text model, quantised ones as plain numbers.

        Raises:
            Refused: they are quantised in a way that is not known here.
        """
        found: dict[str, torch.Tensor] = {}
        for path in sorted({path for _, path in self.parts.get(part, [])}):
            with safe_open(path, framework="pt") as weights:
                for name in (name for name, where in self.parts[part] if where == path):
                    found[OUTER.sub("", name)] = weights.get_tensor(name)
        try:
            return dequantised(found, self._quantization)
        except EngineError as error:
            raise Refused(error.what) from error


class _Loader:
    """Reads parts into a model without storage, and drops them again."""

    def __init__(self, model: Any, files: _Files, dtype: torch.dtype) -> None:
        self._model, self._files = model, files
        self._config = LoadStateDictConfig(
            device_map={"": "cpu"}, dtype=dtype, weight_mapping=get_model_conversion_mapping(model)
        )

    def stream(self, part: str, module: Any, keep: bool = False) -> None:
        """Read this part before its module computes and, unless ``keep``, drop it afterwards."""
        module.register_forward_pre_hook(lambda *_: self._load(part, module))
        if not keep:
            module.register_forward_hook(lambda *_: _drop(module))

    def _load(self, part: str, module: Any) -> None:
        convert_and_load_state_dict_in_model(self._model, self._files.read(part), self._config)
        lacking = [name for name, tensor in _tensors(module) if tensor.is_meta]
        if lacking:
            raise Refused(f"its weight files do not give {part}.{lacking[0]} in a form that can be loaded plainly")


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _drop(module: Any) -> None:
    module.to("meta")


def _compute_buffers(model: Any) -> None:
    """Buffers that no file holds (rotary frequencies): computed now, as loading a model would."""
    for module in model.modules():
        computed = module._non_persistent_buffers_set
        for name in computed:
            if (buffer := module._buffers[name]) is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if computed:
            model._init_weights(module)


def _raw(folder: Path) -> dict[str, Any]:
    raw = read_json(folder / "config.json")
    return {**raw, **text_part(raw)}


def _text_config(folder: Path, trust_remote_code: bool) -> Any:
    family = str(_raw(folder).get("model_type"))
    if family in SAME_CODE:
        fields = {name: value for name, value in _raw(folder).items() if name not in ("model_type", "auto_map")}
        return AutoConfig.for_model(SAME_CODE[family], **fields)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
    except (ValueError, OSError) as error:
        raise Refused(f"transformers has no code for its family {family!r}: {error}") from error
