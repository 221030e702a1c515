"""From a GGUF file to a target folder in bf16: ``python -m infra.targets.convert_gguf MODEL.gguf FOLDER``.

Runs in a process of its own, so that the memory it takes (about six bytes a parameter) goes back at its end.
The same file and the same transformers give the same bytes, hence the same target revision.
"""

import sys
from pathlib import Path
from typing import Any


def convert(source: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and bf16 safetensors of ``source`` into ``folder``.

    Args:
        source: a GGUF file of an architecture that transformers can read (Llama, Qwen2 and others).
        folder: an empty folder.

    Raises:
        ValueError: transformers knows no such architecture, or the file carries no chat template.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if not tokenizer.chat_template:
        raise ValueError(f"{source.name} carries no chat template: not an instruct model")
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # The weights are plain bf16 from here on; left in place, these would make loaders look for GGUF blocks.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    for leftover in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(leftover, None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
