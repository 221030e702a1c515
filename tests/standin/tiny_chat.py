"""A tokenizer of bytes with a chat template, made on the spot."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from infra.config.round import TargetShape
from infra.data.template import Chat
from infra.targets.target import Target

START, END, STOP = "<|im_start|>", "<|im_end|>", "</s>"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_target(
    folder: Path,
    template: str | None = CHATML,
    merges: Sequence[tuple[str, str]] = (),
    special: Sequence[str] = (START, END, STOP),
    eos: str = END,
    bos: str | None = None,
    words: bool = False,
) -> Target:
    """A target's folder with a tokenizer and no weights; ``merges`` join neighbouring bytes anywhere in a text.

    With ``words`` only within words as GPT-2 parts them, which takes a blank to the word behind it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [one + other for one, other in merges]
    tokenizer = Tokenizer(BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    shape = TargetShape(layers=2, hidden_size=8, vocab_size=512, weight_bytes=0, family="llama")
    return Target(name="tiny", path=folder, shape=shape, revision="0" * 16)


def make_chat(
    folder: Path,
    template: str = CHATML,
    merges: Sequence[tuple[str, str]] = (),
    special: Sequence[str] = (START, END, STOP),
    eos: str = END,
    bos: str | None = None,
    words: bool = False,
) -> Chat:
    """The chat of such a target."""
    return Chat(make_target(folder, template, merges, special, eos, bos, words))
