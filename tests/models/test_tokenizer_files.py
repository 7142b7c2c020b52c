"""Tokenizers: chat templates, and tokenizers in directories."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from exactkv.errors import InputError, LoadError
from exactkv.models.gguf.vocabulary import build_tokenizer
from exactkv.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import byte_level_metadata

# --- chat templates ---


def test_smollm_chat(smollm: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    )
    assert smollm.render_chat_template(messages, add_generation_prompt=False) == text
    ids = smollm.apply_chat_template(messages)
    assert smollm.decode(ids, skip_special_tokens=False) == text + "<|im_start|>assistant\n"
    assert ids[0] == smollm.bos_token_id


def with_template(template: str | None) -> Tokenizer:
    metadata = byte_level_metadata()
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return build_tokenizer(metadata, "here")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "<|end|>|<|end|>|"),
        ("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\n", "x\n"),  # trimmed blocks
        ("{{ tools | tojson }}", '[{"name": "é<b>"}]'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{{ strftime_now('%Y') | length }}{{ depth }}{{ add_generation_prompt }}", "47True"),
    ],
)
def test_what_templates_may_use(template: str, expected: str) -> None:
    tokenizer = with_template(template)
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"name": "é<b>"}]
    assert tokenizer.render_chat_template(messages, tools=tools, depth=7) == expected
    assert tokenizer.apply_chat_template(messages, tools=tools, depth=7) == tokenizer.encode(expected, False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refused these messages: roles must alternate"),
        ("{{ messages.append(1) }}", "refused these messages"),  # immutable
        ("{{ ''.__class__.__mro__ }}", "refused these messages"),  # sandboxed
        ("{{ messages[0].content + 1 }}", r"roles \['user'\]"),
        ("{% if %}", "not valid jinja, line 1"),
    ],
)
def test_templates_that_refuse(template: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_template(template).apply_chat_template([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("messages", ["Hi", ["Hi"], [("user", "Hi")]])
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(InputError, match="messages must be a list of mappings"):
        with_template("x").apply_chat_template(messages)


# --- directories ---


def write_directory(directory: Path, **config: Any) -> Path:
    vocabulary = {"a": 0, "b": 1, " ": 2, "<s>": 3, "</s>": 4}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_directory(tmp_path: Path) -> None:
    write_directory(tmp_path, bos_token={"content": "<s>", "lstrip": False}, eos_token="</s>", pad_token=None)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (3, [4], 5)
    assert tokenizer.encode("ab ab</s>") == [0, 1, 2, 0, 1, 4]  # neither cut nor padded; roles are special
    assert tokenizer.decode([0, 4]) == "a"
    assert tokenizer.chat_template is None


def test_directory_that_adds_tokens_around(tmp_path: Path) -> None:
    write_directory(tmp_path, bos_token="<s>", eos_token="</s>", add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("ab") == [3, 0, 1, 4]
    assert tokenizer.encode("ab", add_special_tokens=False) == [0, 1]


def test_directory_templates_and_further_tokens(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    extra = {"5": {"content": "<new>", "special": True}, "3": {"content": "<s>", "special": True}}
    write_directory(tmp_path, chat_template=named, added_tokens_decoder=extra)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.chat_template, tokenizer.bos_token_id) == ("D", 3)
    assert tokenizer.encode("a<new>") == [0, 5]
    (tmp_path / "chat_template.jinja").write_text("J")
    again = Tokenizer.from_directory(tmp_path)
    assert again is not None and again.chat_template == "J"


def test_directories_without_a_readable_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tokenizer.from_directory(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(LoadError, match="pip install transformers sentencepiece"):
            Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match="can't read .*tokenizer.json"):
        Tokenizer.from_directory(tmp_path)
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(LoadError, match="holds a JSON list, expected an object"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(LoadError, match="tokenizer_config.json is not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_other_tokenizer_files_are_converted_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("abb") == [2, 1]
    assert tokenizer.eos_token_ids == [3]
