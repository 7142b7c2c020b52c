"""A tokenizer as llguidance needs it: the bytes that each token adds to a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from exactkv.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from exactkv.models.tokenizer import Tokenizer

BEFORE = "a"
"""A token's bytes are what it adds to a text that begins with this: at a text's beginning decoders drop spaces."""


def llguidance() -> Any:
    """The package. Raises InputError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise InputError(
            "a structure needs the package llguidance, which is not installed: pip install 'exactkv[structure]'"
        ) from None
    return llguidance


class Vocabulary:
    """The tokens of a model with ``vocab_size`` rows of logits.

    ``tokens``: the bytes of each, of special tokens their names. ``special``: ids that are no part of a text: special
    tokens, those without bytes, and rows beyond the tokenizer's own. ``space``: where decoding drops a space that
    begins a text, a token for a single space, else None. ``odd_beginnings``: tokens with a space in front that
    lose another number of spaces there. ``begins_with_space``: bool [V].
    Raises InputError for a tokenizer whose texts cannot be told from its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.vocab_size = vocab_size
        self.tokens, self.special = token_bytes(tokenizer, vocab_size)
        self.space, self.odd_beginnings = self._beginnings(tokenizer)
        self.begins_with_space = torch.tensor([text[:1] == b" " for text in self.tokens])
        package = llguidance()
        self.backend: LLTokenizer = package.LLTokenizer(
            package.TokenizerWrapper(_Given(tokenizer, self.tokens, self.special)), n_vocab=vocab_size
        )

    def _beginnings(self, tokenizer: Tokenizer) -> tuple[int | None, tuple[int, ...]]:
        special = set(self.special)
        spaces = [i for i, text in enumerate(self.tokens) if text[:1] == b" " and i not in special]
        shown = tokenizer.backend.decode_batch([[i] for i in spaces], skip_special_tokens=False)
        begun = {i: text.encode() for i, text in zip(spaces, shown, strict=True)}
        dropped = [i for i in spaces if begun[i] == self.tokens[i][1:]]
        if not dropped:
            return None, ()
        single = next((i for i in spaces if self.tokens[i] == b" "), None)
        if single is None:
            raise InputError(
                "this tokenizer's decoder drops a space at a text's beginning, and there is no token for a space "
                "alone; such a model cannot be given a structure"
            )
        return single, tuple(sorted(set(spaces) - set(dropped)))


@lru_cache(maxsize=4)
def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """Made once for a model; it takes about a second where there are many tokens."""
    return Vocabulary(tokenizer, vocab_size)


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[bytes], list[int]]:
    """The bytes of each token, and the ids of those that are no part of a text."""
    backend = tokenizer.backend
    added = backend.get_added_tokens_decoder()
    ids = range(min(vocab_size, tokenizer.vocab_size))
    if "ByteLevel" in repr(backend.decoder):
        values = {character: byte for byte, character in _byte_level_alphabet().items()}
        pieces = [backend.id_to_token(i) or "" for i in ids]
        tokens = [_from_alphabet(piece, values) for piece in pieces]
    else:
        tokens = _added_to_a_text(tokenizer, ids)
        for byte in range(256):
            token = backend.token_to_id(f"<0x{byte:02X}>")
            if token in tokenizer.byte_ids and token in ids:
                tokens[token] = bytes([byte])
    special = []
    for i, known in added.items():
        if i in ids:
            tokens[i] = known.content.encode()
            if known.special:
                special.append(i)
    special += [i for i in ids if not tokens[i] and i not in special]
    special += range(len(ids), vocab_size)
    tokens = [token or f"<[{i}]>".encode() for i, token in enumerate(tokens)]
    tokens += [f"<[{i}]>".encode() for i in range(len(ids), vocab_size)]
    return tokens, special


def _added_to_a_text(tokenizer: Tokenizer, ids: Sequence[int]) -> list[bytes]:
    """What each token adds to a text, as the tokenizer's own decoder says."""
    backend = tokenizer.backend
    first = tokenizer.encode(BEFORE, add_special_tokens=False)
    before = backend.decode(first, skip_special_tokens=False)
    texts = backend.decode_batch([[*first, i] for i in ids], skip_special_tokens=False)
    return [text.removeprefix(before).encode() for text in texts]


def _byte_level_alphabet() -> dict[int, str]:
    """Byte -> the character by which byte-level BPE writes it (GPT-2's ``bytes_to_unicode``)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _from_alphabet(piece: str, values: dict[str, int]) -> bytes:
    try:
        return bytes(values[character] for character in piece)
    except KeyError:  # written as it is, as the decoder takes it
        return piece.encode()


class _Given:
    """What llguidance asks of a tokenizer that is not its own."""

    eos_token_id: int
    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int]):
        self.tokens, self.special_token_ids, self._tokenizer = tokens, special, tokenizer
        ends = tokenizer.eos_token_ids
        self.eos_token_id = ends[0] if ends and ends[0] < len(tokens) else special[0] if special else 0

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError
        return self._tokenizer.encode(text, add_special_tokens=False)
