"""Tokenizers of the families that are known open and work; what one lacks is said by name."""

import base64
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import sentencepiece
import torch
from standin.tiny import NAME, random_llama, small_round, write_prompts
from standin.tiny_chat import CHATML, make_target
from transformers.convert_slow_tokenizer import bytes_to_unicode

from infra.config.load import build_round
from infra.config.round import TargetShape
from infra.config.settings import Settings
from infra.data.template import Chat
from infra.errors import ConfigError
from infra.machine.gpus.readings import GpuReport
from infra.round.context import RoundContext
from infra.round.preflight import faults
from infra.steps.plan import make_plan
from infra.targets.target import Target

CASES = Path(__file__).resolve().parents[1] / "cases"
HELLO = [{"role": "user", "content": "Grüß Gott 🙂\n the  end"}]
WORDS = (b"th", b"the", b" the", b"He", b"ll")

KIMI = '''
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer


class OwnTokenizer(PreTrainedTokenizer):
    """The shape of Kimi-K2's: ids by tiktoken, special tokens behind the ranks, encode and decode overridden."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, added_tokens_decoder, unk_token, **rest):
        ranks = load_tiktoken_bpe(vocab_file)
        special = {added.content: number for number, added in added_tokens_decoder.items()}
        pattern = r"[\\p{Han}]+|\\p{N}{1,3}| ?[\\p{L}\\p{M}]+| ?[^\\s\\p{L}\\p{N}]+|\\s+"
        self.model = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        spelled = bytes_to_unicode()
        self.bytes_of = {text: byte for byte, text in spelled.items()}
        words = (self.model.decode_single_token_bytes(number) for number in range(self.model.n_vocab))
        self.words = ["".join(spelled[byte] for byte in word) for word in words]
        self.numbers = {word: number for number, word in enumerate(self.words)}
        self.unknown = special[str(unk_token)]
        super().__init__(unk_token=unk_token, **rest)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return self.numbers

    def encode(self, text, allow_special_tokens=True, **rest):
        if rest:
            return super().encode(text, **rest)
        return self.model.encode(text, allowed_special="all" if allow_special_tokens else set())

    def decode(self, token_ids, **rest):
        return super().decode(token_ids, **rest) if rest else self.model.decode(token_ids)

    def _tokenize(self, text, **rest):
        return [self.words[number] for number in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.numbers.get(token, self.unknown)

    def _convert_id_to_token(self, index):
        return self.words[index]

    def convert_tokens_to_string(self, tokens):
        return bytes(self.bytes_of[letter] for letter in "".join(tokens)).decode("utf-8", "replace")

    def apply_chat_template(self, conversation, tools=None, tokenize=False, add_generation_prompt=True, **rest):
        return super().apply_chat_template(
            conversation, tools=tools, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **rest
        )
'''
KIMI_TEMPLATE = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
    "{% if thinking is defined and not thinking %}<think></think>{% else %}<think>{% endif %}{% endif %}"
)
SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "[UNK]")


def target(folder: Path, trust: bool = False, family: str = "llama") -> Target:
    shape = TargetShape(layers=2, hidden_size=8, vocab_size=512, weight_bytes=0, family=family)
    return Target(name="tiny", path=folder, shape=shape, revision="0" * 16, trust_remote_code=trust)


def put(folder: Path, files: Mapping[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def ranks() -> str:
    words = [bytes([byte]) for byte in range(256)] + list(WORDS)
    return "".join(f"{base64.b64encode(word).decode()} {number}\n" for number, word in enumerate(words))


def kimi(folder: Path, code: str = KIMI) -> Path:
    first = 256 + len(WORDS)
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    names = {**dict.fromkeys(SPECIAL, True), "<think>": False, "</think>": False}
    added = {
        str(first + number): plain | {"content": text, "special": special}
        for number, (text, special) in enumerate(names.items())
    }
    config = {
        "tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL[2:6]),
    }  # fmt: skip
    shutil.copytree(CASES / "tokenizer-needs-tiktoken", folder)
    return put(
        folder,
        {
            "tokenization_own.py": code, "tokenizer_config.json": config, "tiktoken.model": ranks(),
            "chat_template.jinja": KIMI_TEMPLATE, "generation_config.json": {"eos_token_id": first + 2},
        },
    )  # fmt: skip


def test_a_tokenizer_in_the_way_of_kimi_renders_encodes_and_decodes(tmp_path: Path) -> None:
    chat = Chat(target(kimi(tmp_path / "kimi"), trust=True, family="kimi_k2"))
    text = "<|im_user|>user<|im_middle|>Grüß Gott 🙂\n the  end<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    assert chat.text(HELLO) == text
    ids = chat.render(HELLO)
    assert ids == chat.encode(text)
    assert chat.decode(ids) == text
    assert len(ids) < len(text.encode()) - sum(len(token) - 1 for token in SPECIAL if token in text)
    assert chat.render(HELLO, {"thinking": False})[-2:] == chat.encode("<think></think>")
    eos, end = chat.encode("[EOS]<|im_end|>")
    assert chat.eos_ids == (eos, end)
    assert {"<|im_end|>", "[EOS]", "[BOS]"} <= set(chat.special_tokens)
    assert not {"<think>", "</think>"} & set(chat.special_tokens)
    assert (
        chat.decode(chat.encode("<think>Hm.</think>Yes the 🙂<|im_end|>"), special=False)
        == "<think>Hm.</think>Yes the 🙂"
    )


def test_code_is_not_run_and_not_guessed_around_without_trust(tmp_path: Path) -> None:
    """transformers would take tiktoken.model for one of Llama's and split texts otherwise."""
    with pytest.raises(
        ConfigError, match=r"comes as Python code \(tokenization_own\.OwnTokenizer\).*trust_remote_code"
    ):
        Chat(target(kimi(tmp_path / "kimi")))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import tikkken\n" + KIMI, r"needs the Python packages tikkken, which are not installed.*pip install tikkken"),
        (
            KIMI.replace("ranks = load", "__import__('importlib').import_module('tikkken.load')\n        ranks = load"),
            r"needs the Python package tikkken, which is not installed.*pip install tikkken",
        ),
        (KIMI.replace("import bytes_to_unicode", "import spell_bytes"), r"does not fit transformers .*spell_bytes"),
        (KIMI.replace("gpt2.tokenization_gpt2", "gpt2.gone"), r"does not fit transformers .*gpt2\.gone"),
        (KIMI.replace("def get_vocab", "def got_vocab"), r"\(tokenization_own\.Own.* not implement get_vocab"),
        (KIMI.replace("def _tokenize", "def _split"), "does not implement _tokenize"),
        (KIMI.replace("self.unknown = special", "self.unknown = spatial"), "NameError: name 'spatial' is not defined"),
        ("class Other: pass", "OwnTokenizer"),
    ],
)  # fmt: skip
def test_what_is_missing_by_name_is_said_by_name(code: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Chat(target(kimi(tmp_path / "kimi", code), trust=True))
    assert "tokenizer's files" not in str(caught.value)


def test_the_case_no_longer_blames_the_files(tmp_path: Path) -> None:
    """Its class has no get_vocab, so no transformers can open it; tiktoken itself is there."""
    with pytest.raises(ConfigError, match="does not implement get_vocab") as caught:
        Chat(target(CASES / "tokenizer-needs-tiktoken", trust=True))
    assert "files" not in str(caught.value)


def test_a_tokenizer_that_renders_by_its_own_code_needs_no_template(tmp_path: Path) -> None:
    """As Kimi-K3's does."""
    head, tail = KIMI.split("        return super().apply_chat_template(")
    del tail
    own = (
        head
        + '        text = "".join(message["content"] for message in conversation)\n'
        + "        return self.encode(text) if tokenize else text\n"
    )
    folder = kimi(tmp_path / "kimi", own)
    (folder / "chat_template.jinja").unlink()
    chat = Chat(target(folder, trust=True))
    assert chat.decode(chat.render(HELLO)) == HELLO[0]["content"]


def test_one_that_hands_on_to_transformers_needs_its_template(tmp_path: Path) -> None:
    folder = kimi(tmp_path / "kimi")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        Chat(target(folder, trust=True))


def sentencepiece_model() -> bytes:
    made, texts = io.BytesIO(), [f"the fox {number} jumps over {number * number} dogs" for number in range(400)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=made, vocab_size=340, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return made.getvalue()


def bpe() -> dict[str, object]:
    words = [*bytes_to_unicode().values(), "th", "the"]
    return {
        "vocab.json": {word: number for number, word in enumerate(words)},
        "merges.txt": "#version: 0.2\nt h\nth e\n",
    }


@pytest.mark.parametrize("case", sorted(path.name for path in (CASES / "configs").iterdir()))
def test_the_targets_config_does_not_keep_a_whole_tokenizer_shut(case: str, tmp_path: Path) -> None:
    """Kimi-K2's is of a family that transformers does not know, with rope fields that a bare config refuses."""
    folder = make_target(tmp_path).path
    shutil.copy(CASES / "configs" / case, folder / "config.json")
    assert Chat(target(folder)).render(HELLO)


@pytest.mark.parametrize(
    ("family", "kind", "files"),
    [
        ("llama", "LlamaTokenizer", "sentencepiece"), ("mistral", "LlamaTokenizer", "sentencepiece"),
        ("deepseek_v2", "LlamaTokenizerFast", "fast"), ("deepseek_v3", "LlamaTokenizerFast", "fast"),
        ("llama", "PreTrainedTokenizerFast", "fast"), ("mistral", "LlamaTokenizerFast", "fast"),
        ("qwen2", "Qwen2Tokenizer", "bpe"), ("qwen3", "Qwen2Tokenizer", "bpe"), ("qwen3_moe", "Qwen2Tokenizer", "bpe"),
        ("qwen2", "Qwen2Tokenizer", "fast"), ("qwen2_moe", "Qwen2Tokenizer", "fast"),
        ("qwen3", "Qwen2Tokenizer", "fast"),
        ("gpt_oss", "PreTrainedTokenizerFast", "fast"), ("minimax_m2", "GPT2Tokenizer", "fast"),
        ("glm4_moe", "PreTrainedTokenizer", "fast"), ("llama", "PreTrainedTokenizerFast", "tiktoken"),
    ],
)  # fmt: skip
def test_what_each_known_family_ships_is_opened(family: str, kind: str, files: str, tmp_path: Path) -> None:
    """Files and class as the family's repositories have them; Kimi's are in a test of their own."""
    config = {"tokenizer_class": kind, "chat_template": CHATML, "eos_token": "<|im_end|>", "unk_token": None}
    shipped: dict[str, object] = {"tokenizer_config.json": config}
    if files == "fast":
        made = make_target(tmp_path / "made").path
        shipped["tokenizer.json"] = (made / "tokenizer.json").read_bytes()
    elif files == "sentencepiece":
        shipped |= {"tokenizer.model": sentencepiece_model(), "tokenizer_config.json": config | {"unk_token": "<unk>"}}
    elif files == "tiktoken":
        shipped["tokenizer.model"] = ranks()
    else:
        shipped |= bpe()
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512, "num_attention_heads": 2}
    folder = put(tmp_path / "target", shipped | {"config.json": sizes | {"model_type": family}})
    chat = Chat(target(folder, family=family))
    ids = chat.render([{"role": "user", "content": "the fox"}])
    assert chat.decode(ids) == chat.text([{"role": "user", "content": "the fox"}])
    assert ids[-1] not in chat.eos_ids
    assert chat.encode("<|im_end|>")[0] in chat.eos_ids


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("vocabulary", ["none", "tekken", "empty"])
def test_a_folder_without_a_vocabulary_makes_no_empty_tokenizer(
    kind: str, family: str, vocabulary: str, tmp_path: Path
) -> None:
    """transformers makes one of two or three tokens and says nothing."""
    files: dict[str, object] = {
        "config.json": {"model_type": family},
        "tokenizer_config.json": {"tokenizer_class": kind},
    }
    if vocabulary == "tekken":
        files["tekken.json"] = {"vocab": [], "special_tokens": [], "config": {}}
    if vocabulary == "empty":
        files |= {"vocab.json": {}, "merges.txt": ""}
    words = {
        "none": "it has no tokenizer, none of",
        "tekken": r"only tokenizer is tekken\.json",
        "empty": "cannot be loaded",
    }
    with pytest.raises(ConfigError, match=words[vocabulary]):
        Chat(target(put(tmp_path, files)))


class TestTemplates:
    def without(self, folder: Path) -> Path:
        return make_target(folder, template=None).path

    @pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
    @pytest.mark.parametrize("named", [False, True])
    def test_a_template_in_the_processors_files_is_read(self, file: str, named: bool, tmp_path: Path) -> None:
        template = (
            [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}] if named else CHATML
        )
        folder = put(self.without(tmp_path), {file: {"chat_template": template}})
        assert Chat(target(folder)).text(HELLO).startswith("<|im_start|>user")

    def test_the_tokenizers_own_template_comes_first(self, tmp_path: Path) -> None:
        folder = put(make_target(tmp_path).path, {"chat_template.json": {"chat_template": "no"}})
        assert Chat(target(folder)).text(HELLO).startswith("<|im_start|>user")

    @pytest.mark.parametrize("place", ["chat_template.json", "additional_chat_templates"])
    def test_named_templates_without_a_default_are_a_sentence(self, place: str, tmp_path: Path) -> None:
        folder = self.without(tmp_path)
        if place.endswith(".json"):
            named = [{"name": name, "template": CHATML} for name in ("tool_use", "rag")]
            put(folder, {place: {"chat_template": named}})
        else:
            put(folder / place, {"tool_use.jinja": CHATML, "rag.jinja": CHATML})
        with pytest.raises(
            ConfigError, match=r"named chat templates rag, tool_use, and none is `default`.*chat_template"
        ):
            Chat(target(folder))

    @pytest.mark.parametrize(
        "content", [{"chat_template": 5}, {"chat_template": [5]}, {"chat_template": {"default": 5}}]
    )
    def test_what_is_no_template_is_a_sentence(self, content: object, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="chat template"):
            Chat(target(put(self.without(tmp_path), {"chat_template.json": content})))

    @pytest.mark.parametrize("content", [{}, {"chat_template": None}, {"chat_template": ""}])
    def test_an_empty_one_is_none(self, content: object, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="has no chat template"):
            Chat(target(put(self.without(tmp_path), {"chat_template.json": content})))


def test_preflight_says_it_before_anything_is_made(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path / "state", cache_dir=tmp_path / "cache", models_dir=tmp_path / "models")
    config = build_round(small_round(*write_prompts(tmp_path)))
    random_llama(settings.models_dir / NAME, 320, torch.float32)
    no_gpu = GpuReport(False, "no NVIDIA driver", "", ())
    assert any("it has no tokenizer, none of" in text for text in faults(config, settings, no_gpu))
    with pytest.raises(ConfigError, match="it has no tokenizer, none of"):
        make_plan(RoundContext(config, settings))
    make_target(settings.models_dir / NAME)
    assert not any("tokenizer" in text for text in faults(config, settings, no_gpu))
