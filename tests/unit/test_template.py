import json
import shutil
from itertools import product
from pathlib import Path

import pytest
from standin.tiny_chat import CHATML, make_chat, make_target

from infra.data.template import Chat
from infra.errors import ConfigError

HELLO = [{"role": "user", "content": "Grüß Gott 🙂"}]


def test_renders_as_the_template_says(tmp_path: Path) -> None:
    chat = make_chat(tmp_path)
    text = "<|im_start|>user\nGrüß Gott 🙂<|im_end|>\n<|im_start|>assistant\n"
    assert chat.text(HELLO) == text
    ids = chat.render(HELLO)
    assert chat.decode(ids) == text
    assert ids == chat.encode(text)
    assert chat.text(HELLO, add_generation_prompt=False) == text.removesuffix("<|im_start|>assistant\n")


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, CHATML + "{% if thinking %}<think>{% endif %}")
    assert not chat.text(HELLO).endswith("<think>")
    assert chat.text(HELLO, {"thinking": True}).endswith("assistant\n<think>")
    assert chat.decode(chat.render(HELLO, {"thinking": True})).endswith("<think>")


def test_end_tokens_come_from_generation_config_too(tmp_path: Path) -> None:
    end, stop = make_chat(tmp_path).encode("<|im_end|></s>")
    assert make_chat(tmp_path).eos_ids == (end,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, end]}))
    assert make_chat(tmp_path).eos_ids == (end, stop)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    assert make_chat(tmp_path).eos_ids == (end, stop)


def test_answers_are_decoded_without_special_tokens(tmp_path: Path) -> None:
    chat = make_chat(tmp_path)
    ids = chat.encode("Yes.<|im_end|>")
    assert chat.decode(ids) == "Yes.<|im_end|>"
    assert chat.decode(ids, special=False) == "Yes."


def test_a_target_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny has no chat template"):
        Chat(make_target(tmp_path, template=None))


def test_a_target_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "gone")
    shutil.rmtree(target.path)
    target.path.mkdir()
    with pytest.raises(ConfigError, match="tokenizer of target tiny cannot be loaded"):
        Chat(target)


def test_a_conversation_the_template_refuses_is_named(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="roles must alternate"):
        chat.render(HELLO)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *product(("tokenizer.json", "tokenizer_config.json"), ("", "[]", "null", "{")),
        ("tokenizer.json", '{"added_tokens": [], "model": 5}'),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_its_targets_name(file: str, text: str, tmp_path: Path) -> None:
    target = make_target(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=f"the tokenizer of target {target.name} cannot be loaded"):
        Chat(target)


@pytest.mark.parametrize("text", ["", "[]", "\udcff", '{"eos_token_id": "</s>"}', '{"eos_token_id": [[1]]}'])
def test_a_damaged_generation_config_is_refused_by_name(text: str, tmp_path: Path) -> None:
    chat = make_chat(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        print(chat.eos_ids)
