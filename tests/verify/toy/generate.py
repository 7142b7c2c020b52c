"""One text: plain greedy decoding, and decoding with drafts that are looked up in the text so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.verify.toy.cache import Cache, feed
from tests.verify.toy.model import Model, padded

PIECE = 7
"""Prompt tokens a pass."""
DRAFTS = 3


class Plain:
    """An iterator of tokens. ``cache`` holds the prompt and the ``tokens`` so far, but not the last of them."""

    SLACK = 2 * DRAFTS + 2

    def __init__(self, model: Model, prompt: Sequence[int], max_tokens: int, stop: Sequence[int]):
        self.model, self.prompt, self.max_tokens, self.stop = model, list(prompt), max_tokens, set(stop)
        self.cache = Cache(model, slack=self.SLACK)
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.rounds = 0

    def prefill(self) -> int:
        """Feed the prompt in pieces: the first token."""
        for at in range(0, len(self.prompt), PIECE):
            (logits,) = feed(self.cache, [self.prompt[at : at + PIECE]])
        return int(logits[-1].argmax())

    def emit(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.stop:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"

    def run(self) -> Iterator[int]:
        token = self.prefill()
        while True:
            self.emit(token)
            yield token
            if self.finish_reason:
                return
            (logits,) = feed(self.cache, [[token]])
            token = int(logits[-1].argmax())


class Lookup(Plain):
    """Drafts are what followed the last token, or the last two, when they occurred before."""

    def run(self) -> Iterator[int]:
        try:
            accepted = [self.prefill()]
            while True:
                yield from self.emitted(accepted)
                if self.finish_reason:
                    return
                accepted = self.verified(self.drafts())
        finally:
            self.settle()

    def emitted(self, accepted: Sequence[int]) -> Iterator[int]:
        """Give out the accepted tokens one by one, until one ends the text."""
        for token in accepted:
            self.emit(token)
            yield token
            if self.finish_reason:
                return

    def drafts(self) -> list[int]:
        text = [*self.prompt, *self.tokens]
        room = min(DRAFTS, self.max_tokens - len(self.tokens) - 1)
        for n in (2, 1):
            for at in range(len(text) - n - 1, -1, -1):
                if text[at : at + n] == text[-n:]:
                    return text[at + n : at + n + max(0, room)]
        return []

    def verified(self, drafts: list[int]) -> list[int]:
        """Feed the last token with the drafts after it: the drafts that greedy decoding agrees with, and one more."""
        (logits,) = feed(self.cache, [[self.tokens[-1], *drafts]])
        choices = [int(row.argmax()) for row in logits]
        agreed = next((i for i, d in enumerate(drafts) if choices[i] != d), len(drafts))
        self.roll_back(len(drafts) - agreed)
        return choices[: agreed + 1]

    def roll_back(self, rejected: int) -> None:
        self.cache.rewind([rejected])

    def settle(self) -> None:
        """Nothing is held that was not given out, also when the stream was closed within an accepted draft."""
        surplus = self.cache.lengths[0] - len(self.prompt) - len(self.tokens)
        if surplus >= 0:
            self.cache.rewind([surplus + 1])


class Assisted(Lookup):
    """Drafts of a helper that is right for as many tokens as ``SCRIPT`` says, round after round, and then wrong."""

    SCRIPT = (3, 3, 0, 1, 2)

    def drafts(self) -> list[int]:
        text, count = [*self.prompt, *self.tokens], min(DRAFTS, self.max_tokens - len(self.tokens) - 1)
        right = self.SCRIPT[self.rounds % len(self.SCRIPT)]
        self.rounds += 1
        for i in range(max(0, count)):
            best = int(self.model.forward(padded([text]))[0, -1].argmax())
            text.append(best if i < right else (best + 1) % self.model.config.vocab_size)
        return text[len(text) - count :] if count > 0 else []
