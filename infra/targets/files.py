"""What the names of a model's files tell: whether they can be a whole target, and if not, what is there instead."""

import re
from collections.abc import Iterable
from fnmatch import fnmatch

OPENED = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")
"""Files with a vocabulary, by what reads them: tokenizers, sentencepiece or tiktoken, tiktoken, BPE, WordPiece."""
INDEX = "model.safetensors.index.json"
ADAPTER, MISTRAL, TEKKEN = "adapter_config.json", "params.json", "tekken.json"
NO_WEIGHTS = ("consolidated*", "adapter_*")
"""Safetensors that are no weights of the target: the same ones in Mistral's layout, and adapters'."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
OTHERS = {
    "*.gguf": "GGUF",
    "*.msgpack": "Flax",
    "*.h5": "TensorFlow",
    "*.onnx": "ONNX",
    "*.npz": "MLX",
    "*.mlmodel": "Core ML",
}
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def whole_fault(names: Iterable[str]) -> tuple[str, str]:
    """Why files with these names are no whole target, and what to do; two empty texts when nothing speaks against it.

    Args:
        names: the files of one folder, without sub-folders.
    """
    found = sorted(set(names))
    for fault in (_adapter, _config, _weights, _parts, _tokenizer):
        what, fix = fault(found)
        if what:
            return what, fix
    return "", ""


def vocabularies(names: Iterable[str]) -> list[str]:
    """The files with a vocabulary."""
    return [name for name in sorted(set(names)) if _is(name, OPENED)]


def vocabulary_fault(names: Iterable[str]) -> tuple[str, str]:
    """Why no tokenizer can be made of files with these names, and what to do; empty when one may be."""
    return _tokenizer(sorted(set(names)))


def weight_names(names: Iterable[str]) -> list[str]:
    """The files that hold the target's weights."""
    return [name for name in names if name.endswith(".safetensors") and not _is(name, NO_WEIGHTS)]


def _adapter(names: list[str]) -> tuple[str, str]:
    if ADAPTER in names and not weight_names(names):
        return "it is an adapter for another model", "merge it into that model, save the whole and name the result"
    return "", ""


def _config(names: list[str]) -> tuple[str, str]:
    if "config.json" in names:
        return "", ""
    if MISTRAL in names:
        return (
            "it is in Mistral's own layout (params.json) and has no config.json",
            "name a repository of the same model in transformers' layout",
        )
    return "it has no config.json" + _instead(names), "name the repository or folder of the model itself"


def _weights(names: list[str]) -> tuple[str, str]:
    if weight_names(names):
        return "", ""
    convert = "name a revision or repository that has *.safetensors (many have a branch for it), or convert them"
    if pickled := [name for name in names if _is(name, PICKLED)]:
        return (
            f"its weights are pickled only ({pickled[0]}), and pickles can run any code when they are opened",
            convert,
        )
    if any(_is(name, ("consolidated*.safetensors",)) for name in names):
        return "its only weights are in Mistral's own layout (consolidated*.safetensors)", convert
    return "it has no weights in *.safetensors" + _instead(names), convert


def _parts(names: list[str]) -> tuple[str, str]:
    """Parts that are missing by their own numbers; those of an index are for who has read it."""
    there: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(PART.fullmatch, weight_names(names))):
        there.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    for (stem, count), numbers in there.items():
        if missing := sorted(set(range(1, count + 1)) - numbers):
            first = f"{stem}-{missing[0]:05d}-of-{count:05d}.safetensors"
            return f"{len(missing)} of its {count} weight files are missing, such as {first}", "get the whole of it"
    return "", ""


def _tokenizer(names: list[str]) -> tuple[str, str]:
    found = vocabularies(names)
    if not found and TEKKEN in names:
        return (
            "its only tokenizer is tekken.json, which brings no chat template and which only Mistral's library reads",
            "name a repository of the same model that has tokenizer.json and a chat template",
        )
    if not found:
        return f"it has no tokenizer, none of {', '.join(OPENED)}", "get the tokenizer's files from the publisher"
    if found == ["vocab.json"] and "merges.txt" not in names:
        return "merges.txt, which belongs to its vocab.json, is missing", "get it from the publisher"
    return "", ""


def _instead(names: list[str]) -> str:
    kinds = [kind for pattern, kind in OTHERS.items() if any(_is(name, (pattern,)) for name in names)]
    return f"; what is there is {' and '.join(kinds)}" if kinds else ""


def _is(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
