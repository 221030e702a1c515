"""What releases of SGLang have of what the capture plugin reaches for, read from wheels without importing them.

    python tests/standin/sglang_releases.py WHEEL_OR_FOLDER... > tests/standin/recorded/sglang-releases.json

One entry a release; a folder is a site-packages.

The file is its committed result; a test holds the plugin, and the rows of ``layer_ids.py``, to it.
"""

import ast
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded" / "sglang-releases.json"
SETTER = "set_eagle3_layers_to_capture"
MODELS = (
    "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss", "deepseek_v2",
    "kimi_k25",
)  # fmt: skip
PARALLEL = ("attn_tp_rank", "attn_cp_rank", "pp_size")

Read = Callable[[str], str]


def facts(read: Read) -> dict[str, object]:
    """The facts of one release.

    Args:
        read: gives the text of a file below ``sglang/srt``.
    """
    worker = _class(read("managers/tp_worker.py"), "TpModelWorker")
    logits = read("layers/logits_processor.py")
    batches = read("managers/schedule_batch.py")
    registry = read("plugins/hook_registry.py")
    context = read("runtime_context.py")
    return {
        "TpModelWorker.__init__": _assigned(worker, ("is_draft_worker",)),
        "TpModelWorker.model_runner": "model_runner" in _functions(worker),
        "TpModelWorker.forward_batch_generation": _parameters(worker, "forward_batch_generation"),
        "LogitsProcessor.forward": _parameters(_class(logits, "LogitsProcessor"), "forward"),
        "LogitsProcessorOutput": _annotated(_class(logits, "LogitsProcessorOutput"), ("customized_info",)),
        "ScheduleBatch": _annotated(
            _class(batches, "ScheduleBatch"), ("reqs", "forward_mode", "prefix_lens", "extend_lens")
        ),
        "Req.__init__": _assigned(_class(batches, "Req"), ("rid", "origin_input_ids")),
        "ForwardMode.is_extend_without_speculative": "is_extend_without_speculative"
        in _functions(_class(read("model_executor/forward_batch_info.py"), "ForwardMode")),
        "HookRegistry.register": _parameters(_class(registry, "HookRegistry"), "register"),
        "HookType": [name for name in ("AFTER", "AROUND") if f"    {name} = " in registry],
        "get_parallel": [name for name in PARALLEL if "def get_parallel(" in context and name in context],
        "the scheduler loads plugins": "load_plugins()" in ast.unparse(
            _functions(ast.parse(read("managers/scheduler.py")))["run_scheduler_process"]
        ),
        SETTER: {name: fingerprint(read(f"models/{name}.py")) for name in MODELS},
    }  # fmt: skip


def fingerprint(text: str) -> str:
    """Hash (8 hex digits) of the model's setter without regard to layout; "inherited" where it has none of its own."""
    setters = [
        functions[SETTER]
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and "ForC" in node.name and SETTER in (functions := _functions(node))
    ]
    if not setters:
        return "inherited"
    # How the parallel group is looked up changes without changing what is captured.
    source = ast.unparse(setters[0]).replace("get_parallel().pp_group", "get_pp_group()")
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def reader(place: Path) -> tuple[str, Read]:
    """Version and reader of a wheel, or of a folder that SGLang is installed in."""
    if place.is_dir():
        [metadata] = place.glob("sglang-*.dist-info")
        return metadata.name.split("-")[1].removesuffix(".dist"), lambda name: (place / "sglang/srt" / name).read_text()
    wheel = zipfile.ZipFile(place)
    return place.name.split("-")[1], lambda name: wheel.read(f"sglang/srt/{name}").decode()


def recorded() -> dict[str, dict[str, object]]:
    """The committed table, by version."""
    table: dict[str, dict[str, object]] = json.loads(RECORDED.read_text())
    return table


def _class(text: str, name: str) -> ast.ClassDef:
    return next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)


def _functions(node: ast.ClassDef | ast.Module) -> dict[str, ast.FunctionDef]:
    return {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}


def _parameters(node: ast.ClassDef, function: str) -> list[str]:
    arguments = _functions(node)[function].args
    return [argument.arg for argument in arguments.args]


def _annotated(node: ast.ClassDef, names: tuple[str, ...]) -> list[str]:
    found = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    return [name for name in names if name in found]


def _assigned(node: ast.ClassDef, names: tuple[str, ...]) -> list[str]:
    source = ast.unparse(_functions(node)["__init__"])
    return [name for name in names if re.search(rf"\bself\.{name}\b[^\n]* = ", source)]


def main(places: list[str]) -> None:
    """Print the table, one line a fact."""
    table = {}
    for place in places:
        version, read = reader(Path(place))
        table[version] = facts(read)
    entries = []
    for version in sorted(table):
        lines = [f"  {json.dumps(name)}: {json.dumps(fact)}" for name, fact in table[version].items()]
        entries.append(f' "{version}": {{\n' + ",\n".join(lines) + "\n }")
    print("{\n" + ",\n".join(entries) + "\n}")


if __name__ == "__main__":
    main(sys.argv[1:])
