"""Single tokens as APIs tell them."""

from __future__ import annotations

import re
from functools import lru_cache

from tokenizers.pre_tokenizers import ByteLevel

from exactkv.models.model import Model

LEAST_LOGPROB = -9999.0
"""Said instead of minus infinity, which JSON lacks."""


@lru_cache(maxsize=1)
def _bytes_of_characters() -> dict[str, int]:
    """What byte each character of byte-level vocabularies stands for: printable ones for themselves, others in order
    from U+0100 on (GPT-2's table)."""
    alphabet = set(ByteLevel.alphabet())
    plain = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = (byte for byte in range(256) if byte not in plain.values())
    return plain | dict(zip(sorted(alphabet - plain.keys()), others, strict=True))


def token_bytes(model: Model, token: int) -> bytes:
    """What a token stands for, also where that is part of a character."""
    if model.tokenizer is None:
        return b""
    text = model.tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" not in text:
        return text.encode()
    written = model.tokenizer.backend.id_to_token(token) or ""
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", written):
        return bytes([int(match[1], 16)])
    table = _bytes_of_characters()
    if written and all(character in table for character in written):
        return bytes(table[character] for character in written)
    return text.encode()


def token_text(model: Model, token: int) -> str:
    """A token's text; where it is part of a character, "bytes:" and these escaped, as OpenAI writes it."""
    raw = token_bytes(model, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """A log-probability as a number."""
    return max(logprob, LEAST_LOGPROB)
