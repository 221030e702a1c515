"""Loads a draft's folder with the installed SGLang's own classes; runs under the Python of SGLang's environment.

    python sglang_load.py TARGET DRAFT PORT OUT     writes OUT.safetensors (parameters) and OUT.json (what was read)

A parameter that no tensor of the folder fills stays NaN.
"""

import json
import sys

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs


def main(target: str, draft: str, port: str, out: str) -> None:
    """Build the model on one rank, load the folder, write down what came of it."""
    flags = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native"}
    args = ServerArgs(model_path=target, speculative_draft_model_path=draft, **flags)
    get_context().set_server_args(args)
    place = f"tcp://127.0.0.1:{port}"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=place)
    initialize_model_parallel(backend="gloo")
    get_parallel().override_permanently(tp_rank=0)
    config = ModelConfig.from_server_args(args, model_path=draft, is_draft_model=True)
    model = LlamaForCausalLMEagle3(config.hf_config)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.load_weights(load_file(f"{draft}/model.safetensors").items())
    save_file({name: value.detach().contiguous() for name, value in model.named_parameters()}, f"{out}.safetensors")
    facts = {
        "architectures": config.hf_config.architectures,
        "ids": config.hf_config.eagle_config["eagle_aux_hidden_state_layer_ids"],
        "hot_token_id": model.hot_token_id.tolist() if model.hot_token_id is not None else None,
    }
    with open(f"{out}.json", "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
