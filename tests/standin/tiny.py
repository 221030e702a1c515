"""A tiny random target and a small round on it."""

import json
from pathlib import Path
from typing import Any

import torch
from standin.tiny_chat import END, make_target
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "standin-target"
VOCABULARY = 320
PLAIN_CHARACTERS = 94
"""The first token ids of ``tiny_chat``: printable ASCII."""
THINGS = ("tides", "moss", "salt", "lenses", "bread", "maps", "bells", "rain", "glass", "ferns", "kites", "clay")


def random_llama(folder: Path, vocabulary: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama of 4 layers, 64 wide, with random weights, saved in ``folder``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=None,
        bos_token_id=None, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return model


def tiny_target(folder: Path) -> None:
    """The target's folder: tokenizer, template, weights; it says only printable characters and its end token."""
    model = random_llama(folder, VOCABULARY, torch.float32)
    make_target(folder)
    end = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    end_id = next(entry["id"] for entry in end if entry["content"] == END)
    with torch.no_grad():
        silent = [token for token in range(PLAIN_CHARACTERS, VOCABULARY) if token != end_id]
        model.lm_head.weight[silent] = 0.0
    model.config.eos_token_id = model.generation_config.eos_token_id = end_id
    model.save_pretrained(folder)


def write_prompts(folder: Path) -> tuple[Path, Path]:
    """Files of 12 conversations of two turns and of 4 evaluation prompts."""
    train, evaluation = folder / "prompts.jsonl", folder / "evaluation.jsonl"
    conversations = [{"id": name, "turns": [f"Tell of {name}.", "More."]} for name in THINGS]
    train.write_text("\n".join(map(json.dumps, conversations)) + "\n")
    asked = [{"id": f"e{number}", "prompt": f"What is {number}?"} for number in range(4)]
    evaluation.write_text("\n".join(map(json.dumps, asked)) + "\n")
    return train, evaluation


def small_round(prompts: Path, evaluation: Path, name: str = "small") -> dict[str, Any]:
    """A round that every step of the real one has, as plain data."""
    return {
        "name": name,
        "target": {"name": NAME},
        "prompts": {"source": str(prompts), "count": len(THINGS), "max_prompt_tokens": 160},
        "generate": {"max_tokens": 16, "concurrency": 4, "timeout_seconds": 60},
        "prepare": {"heldout": 0.2, "max_tokens": 192, "draft_vocab_size": 128},
        "extract": {"taps": [1, 2, 3], "shard_bytes": 1 << 18, "object_bytes": 1 << 17, "concurrency": 2},
        "train": {
            "epochs": 2, "max_steps": 8, "sequence_tokens": 256, "draft_steps": 2, "checkpoints_per_epoch": 2,
            "learning_rate": 1e-3, "optimizer": "adamw", "layers": 1,
        },
        "evaluate": {
            "prompts": {"source": str(evaluation), "count": 4, "max_prompt_tokens": 160},
            "max_tokens": 12, "drafts": 2, "concurrencies": [2], "heldout_count": 4, "layout": "interleaved",
            "tolerance": 0.9, "steady_seconds": 0,
        },
        "engines": {"vllm": {"device": "cpu", "dtype": "float32", "max_model_len": 256, "ready_seconds": 60}},
        "retention": {"states": "keep"},
        # The stand-in has no layers that a reference could know.
        "gates": {"convention": {"reference": "none"}},
    }  # fmt: skip
