"""How SGLang numbers the layers that it captures: a row for some families and versions each, with its source."""

from infra.engines.layer_ids import Numbering, Rule, Unless

CALLS = (
    "set_eagle3_layers_to_capture adds 1 to given ids, and the stream that enters a captured layer is kept; the last "
    "layer's output enters none, and id -1 is refused or crashes (read in 0.5.14 to 0.5.23)"
)

RULES = (
    Rule(
        ("llama", "mistral"), (0, 5, 14), (0, 5, 23), -1, 1, "none",
        "0.5.17 (H200) and 0.5.23 (CPU) equal transformers on SmolLM2 at taps 2, 15 and 27 (run); models/llama.py: "
        + CALLS,
    ),
    Rule(
        ("qwen2", "qwen3"), (0, 5, 14), (0, 5, 23), -1, 1, "none",
        "0.5.17 equals transformers on random weights at taps 2, 4 and 5 (run, H200); models/qwen2.py and qwen3.py: "
        + CALLS,
    ),
    Rule(
        ("qwen2_moe", "qwen3_moe"), (0, 5, 14), (0, 5, 23), -1, 1, "none",
        "0.5.17 equals transformers on random weights at taps 2, 4 and 5, on one GPU and on two (run, H200); "
        "models/qwen2_moe.py and qwen3_moe.py: " + CALLS,
    ),
    Rule(("glm4_moe",), (0, 5, 14), (0, 5, 23), -1, 1, "none", "models/glm4_moe.py: " + CALLS),
    Rule(("minimax_m2",), (0, 5, 14), (0, 5, 23), -1, 1, "none", "models/minimax_m2.py: " + CALLS),
    Rule(
        ("gpt_oss",), (0, 5, 14), (0, 5, 16), -1, 1, "none",
        "models/gpt_oss.py: " + CALLS,
    ),
    Rule(
        ("gpt_oss",), (0, 5, 17), (0, 5, 23), -1, 1, "none",
        "models/gpt_oss.py: as before, but ids whose largest is L are taken as they are, with the last layer's output "
        "(read in 0.5.17 to 0.5.23; unproven: 0.5.17 left transformers from layer 2 on with random weights, H200)",
        Unless("largest is L", 0),
    ),
    Rule(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"), (0, 5, 14), (0, 5, 23), 0, 1, "none",
        "0.5.17 equals transformers on random weights, ids 1, 3, 4 giving taps 2, 4, 5 and ids 3, 4, 5 themselves "
        "(run, H200); models/deepseek_v2.py, to which kimi_k25.py hands on: set_eagle3_layers_to_capture takes ids as "
        "they are, but adds 1 when the first id is 1 (read in 0.5.14 to 0.5.23; until 0.5.10 it always added 1, pull "
        "request 25454)",
        Unless("first is 1", -1),
    ),
)  # fmt: skip

NUMBERING = Numbering("sglang", RULES)
