"""Tokenizers of the kinds that models have, with small vocabularies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from exactkv.models.gguf.vocabulary import build_tokenizer
from exactkv.models.tokenizer import Tokenizer
from tests.generation.tiny_text import byte_tokenizer

PIECES = ["▁", "▁▁", "▁a", "▁▁a", "a", "b", "ab", "▁ab", "{", "}", "▁{", '"', '":', '▁"', "é", "▁é", "0", "1", "10"]
DECODERS = {
    "llama": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    "gemma": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    "metaspace": [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always"), decoders.Fuse()],
}


def sentencepiece(decoder: str, pieces: Sequence[str] = PIECES) -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(pieces)]
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(DECODERS[decoder])
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "[CALL]"])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return Tokenizer(backend, bos_token_id=1, eos_token_ids=[2])


def from_gguf(pieces: Sequence[str] = PIECES) -> Tokenizer:
    """As a GGUF file describes a SentencePiece vocabulary."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(pieces)]
    types = [2, 3, 3, *[6] * 256, *[1] * len(dict.fromkeys(pieces))]
    described: dict[str, Any] = {
        "model": "llama", "tokens": tokens, "token_type": types, "scores": [-float(i) for i in range(len(tokens))],
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return build_tokenizer({f"tokenizer.ggml.{name}": value for name, value in described.items()}, "a file")


def byte_level_bpe() -> Tokenizer:
    """Byte-level BPE with merges, some of which end within a character."""
    tokenizer = byte_tokenizer(None)
    content = json.loads(tokenizer.backend.to_str())
    vocabulary = content["model"]["vocab"]
    merges = [("Ġ", "a"), ("a", "b"), ("Ã", "©"), ("Ġ", "{"), ("ð", "Ł"), ('"', ":"), ("Ġ", "Ġ")]
    at = 300
    for left, right in merges:
        vocabulary[left + right] = at
        at += 1
    content["model"]["merges"] = [list(pair) for pair in merges]
    return Tokenizer(Backend.from_str(json.dumps(content)), bos_token_id=256, eos_token_ids=[257])


KINDS = {
    "llama": lambda: sentencepiece("llama"),
    "gemma": lambda: sentencepiece("gemma"),
    "metaspace": lambda: sentencepiece("metaspace"),
    "gguf": from_gguf,
    "byte-level": byte_level_bpe,
    "bytes": byte_tokenizer,
}
