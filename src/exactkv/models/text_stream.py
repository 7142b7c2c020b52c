"""Text from tokens one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exactkv.models.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are no whole character


class TextStream:
    """Text from tokens one at a time, made by `Tokenizer.stream`: the pieces, joined, are what `decode` says of all.

    What a token adds to the text depends on the tokens before it (spaces, characters of several tokens), so a few of
    them are decoded again with each new one: those since the last place where the text was whole. What later tokens
    may still change is held back: a last character that is not complete, and, in a vocabulary with tokens such as
    <0xE6> for bytes (of which a broken one spoils all its neighbours), a row of these until it ends. Only a row of more
    than 256 of them is settled before; if a broken one follows in it, ``decode`` shows other U+FFFD.
    """

    _MAX_BYTES = 256
    _MAX_WINDOW = 64  # more tokens than these without a whole text are broken bytes: look for another place to begin

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # tokens that are decoded again
        self._num_whole = 0  # how many of them were there when the text was whole last
        self._shown = ""  # what of their text was returned
        self._among_bytes = False

    def step(self, token_id: int) -> str:
        """The text that this token settles: "" while a character is incomplete."""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            self._among_bytes = True
        elif self._among_bytes:  # tokens without text do not end a row of bytes
            self._among_bytes = self._decode([token_id]) == ""
        if self._among_bytes:
            return "" if len(self._window) - self._num_whole <= self._MAX_BYTES else self._settle_bytes()
        text = self._window_text()
        return self._show(text, text.removesuffix(_REPLACEMENT))

    def flush(self) -> str:
        """What is left at the end: an incomplete character as U+FFFD, or ""."""
        text = self._window_text()
        self._among_bytes = False
        return self._show(text, text)

    def _settle_bytes(self) -> str:
        """Show all but the last character if that is not complete."""
        for left in (0, 1, 2, 3):
            count = len(self._window) - left
            text = self._decode(self._window[:count])
            if not text.endswith(_REPLACEMENT):
                break
        else:  # broken
            count = len(self._window)
            text = self._decode(self._window)
        new = text[len(self._shown) :]
        self._window, self._num_whole, self._shown = self._window[count:], 0, ""
        return new

    def _show(self, text: str, settled: str) -> str:
        new = settled[len(self._shown) :]
        self._shown = settled
        if settled == text:
            # A decoder may treat the beginning of a text specially (drop a space), so the window must begin with
            # tokens whose own text is not empty.
            alone = self._decode(self._window[self._num_whole :])
            if alone and not alone.endswith(_REPLACEMENT):
                self._window, self._shown = self._window[self._num_whole :], alone
            self._num_whole = len(self._window)
        elif len(self._window) > self._MAX_WINDOW:
            self._cut(text)
        return new

    def _cut(self, text: str) -> None:
        """Let the window begin at a later token where its text falls in two."""
        for start in range(len(self._window) - 1, len(self._window) - 9, -1):
            before, after = self._decode(self._window[:start]), self._decode(self._window[start:])
            if after and before + after == text:
                self._window, self._num_whole = self._window[start:], 0
                self._shown = after.removesuffix(_REPLACEMENT)
                return

    def _window_text(self) -> str:
        text = self._decode(self._window)
        if text.startswith(self._shown):
            return text
        # A decoder that rewrites what came before, which was returned already.
        return self._shown + self._decode(self._window[self._num_whole :])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)
