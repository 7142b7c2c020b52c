"""Guesses of what a text goes on with, for the model to check many at once, and how many of them to make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Protocol

from exactkv.errors import InputError
from exactkv.generation.reuse import PREFILL_WIDTH, reuse
from exactkv.generation.sampling import GREEDY, History, Sampling, choose
from exactkv.models.model import Model


class Draft(Protocol):
    """Guesses for one text. A guess never changes what is generated, only how fast."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``tokens``, the whole text so far; none where there is no guess. Each
        call's text is the one before with tokens added."""
        ...


@dataclass
class PromptLookup:
    """Drafts copied from the text itself: what followed the last time that its ending stood before (A. Saxena, "Prompt
    lookup decoding", 2023). Of several lengths of ending the longest counts.

    ``longest``, ``shortest``: lengths of endings in tokens. Takes memory and time in proportion to the text's length.
    """

    longest: int = 8
    shortest: int = 2
    _seen: int = field(default=0, repr=False)
    _after: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise InputError(f"lookup of {self.shortest} to {self.longest} tokens; expected 1 <= shortest <= longest")

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """See Draft."""
        self._read(tokens)
        for size in self._sizes():
            if size <= len(tokens) and (place := self._after.get(tuple(tokens[-size:]))) is not None:
                return list(tokens[place : place + most])
        return []

    def _read(self, tokens: Sequence[int]) -> None:
        """Note where each ending of the text up to its last token but one stood; the last has nothing after it."""
        for end in range(max(1, self._seen), len(tokens)):
            for size in self._sizes():
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._seen = max(self._seen, len(tokens))

    def _sizes(self) -> list[int]:
        """The lengths of endings that are noted, the longest first."""
        halved = {self.longest, self.longest // 2, self.longest // 4, self.shortest}
        return sorted((n for n in halved if n >= self.shortest), reverse=True)


class ModelDraft:
    """Drafts from a smaller model of the same vocabulary. It chooses with the same settings and the same noise, so that
    also where tokens are sampled its guess is what it would say in the other's place."""

    def __init__(self, model: Model, sampling: Sampling = GREEDY):
        self.model, self.sampling = model, sampling
        self.cache = model.new_cache()

    @property
    def nbytes(self) -> int:
        """Bytes of its cache."""
        return self.cache.nbytes

    def most_nbytes(self, length: int, most: int) -> int:
        """The most that its cache takes for a text of ``length`` tokens and ``most`` guesses."""
        return self.cache.most_nbytes(length + most, slack=max(self.cache.slack, most))

    def release(self) -> None:
        """Give its memory back; it reads the text anew where it is asked again."""
        self.cache = self.model.new_cache()

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """See Draft."""
        limit = self.cache.max_length
        most = most if limit is None else min(most, limit + 1 - len(tokens))
        if most < 1:
            return []
        text = [*tokens]
        self.cache.slack = max(self.cache.slack, most)
        start = reuse(self.cache, text)
        for begin in range(start, len(text) - 1, PREFILL_WIDTH):
            self.model([text[begin : min(begin + PREFILL_WIDTH, len(text) - 1)]], cache=self.cache, logits="none")
        history = History(text) if self.sampling.reads_text else None
        guess: list[int] = []
        while len(guess) < most:
            logits = self.model([text[-1:]], cache=self.cache, logits="last")
            assert logits is not None
            token = int(choose(logits, [self.sampling], [len(text)], [history]).tokens)
            if token < 0:  # nothing to choose from: no guess, and no reason to end the text
                break
            guess.append(token)
            text.append(token)
            if history is not None:
                history.append(token)
        return guess


def guess_of(draft: Draft | None, ids: Sequence[int], most: int, vocab_size: int) -> list[int]:
    """At most ``most`` guesses of ``draft`` for the text ``ids``, of which it sees a copy. Raises InputError where it
    fails, or gives what are no token ids."""
    if draft is None or most < 1:
        return []
    name = type(draft).__name__
    try:
        given: Any = draft.propose(tuple(ids), most)
        listed = given.tolist() if hasattr(given, "tolist") else list(given)
        guess = [index(token) for token in listed[:most]]
    except Exception as error:  # somebody else's code
        raise InputError(
            f"the draft {name} failed: {type(error).__name__}: {error}; expected a list of token ids"
        ) from error
    if wrong := [token for token in guess if not 0 <= token < vocab_size]:
        raise InputError(f"the draft {name} guessed token {wrong[0]}; the vocabulary is 0 to {vocab_size - 1}")
    return guess


def make_draft(given: Draft | Model | str | None, model: Model, sampling: Sampling) -> Draft | None:
    """What `stream` takes as ``draft``, for one text. Raises InputError where it is none of that."""
    if given is None or given == "none":
        return None
    if given == "lookup":
        return PromptLookup()
    if isinstance(given, Model):
        if given.spec.vocab_size != model.spec.vocab_size:
            raise InputError(
                f"the draft model has {given.spec.vocab_size} tokens, the model {model.spec.vocab_size}; expected a "
                "smaller model of the same family, with the same tokenizer"
            )
        return ModelDraft(given, sampling)
    if callable(getattr(given, "propose", None)) and not isinstance(given, str | type):
        return given
    raise InputError(f"draft is {given!r}; expected 'lookup', a model, a Draft, or None")


@dataclass
class DraftLength:
    """How many tokens to guess: more while guesses come true, and none for a while where they do not.

    ``most``: the largest number. A guess that fails at once costs what its tokens cost to check; so after each such one
    twice as many tokens are generated plainly before the next, up to 64.
    """

    most: int = 12
    size: int = 4
    _failed: int = 0
    _rest: int = 0

    def next(self) -> int:
        """How many to guess now."""
        if self._rest:
            self._rest -= 1
            return 0
        return min(self.size, self.most)

    def learn(self, guessed: int, accepted: int) -> None:
        """What came of the last guess."""
        if not guessed:
            return
        if accepted == guessed:
            self._failed, self.size = 0, min(self.most, 2 * max(guessed, self.size))
        elif accepted:
            self._failed, self.size = 0, max(2, accepted + 1)
        else:
            self._failed, self.size = self._failed + 1, 2
            self._rest = min(64, 1 << self._failed)
