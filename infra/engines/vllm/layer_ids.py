"""How vLLM numbers the layers that it captures: a row for some families and versions each, with its source."""

from infra.engines.layer_ids import Numbering, Rule

CALLS = (
    "_maybe_add_hidden_state is called with the number of the first layer before the layers, and with idx + 1 after "
    "layer idx (read in 0.24.0, 0.32.0 and 0.33.0)"
)

RULES = (
    Rule(
        ("llama", "mistral"), (0, 24, 0), (0, 33, 999), 0, 0, "id",
        "0.24.0 and 0.32.0 equal transformers on SmolLM2 at taps 2, 15, 27 and 30 (run); models/llama.py: "
        + CALLS,
    ),
    Rule(
        ("qwen2", "qwen3"), (0, 24, 0), (0, 33, 999), 0, 0, "id",
        "0.24.0 equals transformers on random weights at taps 2, 4, 5 and 8 (run, H200); models/qwen2.py, used by "
        "qwen3.py: " + CALLS,
    ),
    Rule(
        ("qwen3_moe",), (0, 24, 0), (0, 33, 999), 0, 0, "id",
        "0.24.0 equals transformers on random weights at taps 2, 4, 5 and 8, on one GPU and on two (run, H200); "
        "models/qwen3_moe.py: " + CALLS,
    ),
    Rule(("gpt_oss",), (0, 24, 0), (0, 33, 999), 0, 0, "id", "models/gpt_oss.py: " + CALLS),
    Rule(
        ("minimax_m2",), (0, 32, 0), (0, 32, 999), 0, 0, "id",
        "models/minimax_m2.py: the calls of the other families (read in 0.32.0)",
    ),
    Rule(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"), (0, 32, 0), (0, 33, 999), 0, 1, "id",
        "models/deepseek_v2.py adds hidden_states + residual before layer idx (layer 0 has none yet) and, for L, "
        "after the last layer (read in 0.32.0 and 0.33.0)",
    ),
)  # fmt: skip

NUMBERING = Numbering("vllm", RULES)
