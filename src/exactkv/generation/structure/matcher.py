"""Which tokens a structure allows next, for one text under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from exactkv.errors import InputError
from exactkv.generation.structure.structure import Structure
from exactkv.generation.structure.vocabulary import llguidance, vocabulary_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from exactkv.models.tokenizer import Tokenizer


class Matcher:
    """Follows one reply. ``ends``: the tokens that end it, which are allowed where the structure may end.

    Where decoding drops a space at the beginning of a text, the structure describes the text as it is shown: the
    grammar then begins with one space, which the first token brings or, where it has none, is put before it.
    ``trouble``: why it cannot go on, such as a limit of llguidance's; nothing is allowed then.
    Raises InputError where the structure does not suit the tokenizer.
    """

    def __init__(self, structure: Structure, tokenizer: Tokenizer | None, vocab_size: int, ends: Iterable[int]):
        if tokenizer is None:
            raise InputError("a structure needs a text, and this model has no tokenizer")
        self._vocabulary = vocabulary_of(tokenizer, vocab_size)
        self._untouched = _prepared(structure, tokenizer, vocab_size)
        self._parser = self._untouched.deep_copy()
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64)
        self._tokens: list[int] = []
        self._padded = False
        self._next: tuple[Tensor, bool] | None = None
        self._torn = False  # whether something interrupted what moves the parser
        self.trouble: str | None = None

    def follow(self, tokens: Sequence[int]) -> None:
        """Stand after ``tokens``, all of the reply so far, of which none is an end token."""
        if self._torn:
            self._restart()
        self._torn = True
        same = min(len(tokens), len(self._tokens))
        if list(tokens[:same]) != self._tokens[:same]:
            same = next(i for i in range(same) if tokens[i] != self._tokens[i])
        if same < len(self._tokens):
            self._rewind(same)
        for token in tokens[same:]:
            self._consume(token)
        self._torn = False

    @property
    def complete(self) -> bool:
        """Whether the structure is satisfied, and nothing can follow."""
        allowed, may_end = self._seen()
        return may_end and not bool(allowed.any())

    def mask(self) -> Tensor:
        """bool [V], on the host: the tokens that may come next."""
        allowed, may_end = self._seen()
        mask = allowed.clone()
        mask[self._ends] = may_end
        return mask

    # Within.

    def _seen(self) -> tuple[Tensor, bool]:
        """bool [V], the tokens by which the text may go on, and whether it may end here."""
        if self._next is None:
            self._torn = True
            begins = self._vocabulary.space is not None and not self._tokens
            self._next = self._beginning() if begins else self._here()
            self._torn = False
        return self._next

    def _here(self) -> tuple[Tensor, bool]:
        size = self._vocabulary.vocab_size
        may_end = self.trouble is None and bool(self._parser.is_accepting())
        if self.trouble is not None or self._parser.is_stopped():
            return torch.zeros(size, dtype=torch.bool), may_end
        bits = np.frombuffer(self._parser.compute_bitmask(), dtype=np.uint8)
        self._note_trouble()
        allowed = torch.from_numpy(np.unpackbits(bits, count=size, bitorder="little")).bool()
        allowed[self._vocabulary.backend.eos_tokens] = False  # how a text ends is not the grammar's
        return allowed, may_end

    def _beginning(self) -> tuple[Tensor, bool]:
        """Of the first tokens, those that bring the space, and those before which it is put."""
        with_space, _ = self._here()
        with_space[list(self._vocabulary.odd_beginnings)] = False
        assert self._vocabulary.space is not None
        self._parser.consume_token(self._vocabulary.space)
        without, may_end = self._here()
        self._parser.rollback(1)
        return with_space | (without & ~self._vocabulary.begins_with_space), may_end

    def _consume(self, token: int) -> None:
        given = [token]
        if self._vocabulary.space is not None and not self._tokens:
            self._padded = not bool(self._vocabulary.begins_with_space[token])
            given = [self._vocabulary.space, token] if self._padded else given
        self._tokens.append(token)
        self._next = None
        if self.trouble is None and not self._parser.consume_tokens(given):
            self._note_trouble()

    def _rewind(self, to: int) -> None:
        count = len(self._tokens) - to + (self._padded and to == 0)
        kept, self._next = self._tokens[:to], None
        if self.trouble is None and self._parser.rollback(count):
            self._tokens = kept
            return
        self._restart()
        for token in kept:
            self._consume(token)

    def _restart(self) -> None:
        self._parser, self._tokens, self.trouble = self._untouched.deep_copy(), [], None
        self._next = None

    def _note_trouble(self) -> None:
        if self._parser.is_error():
            self.trouble = str(self._parser.get_error()).strip()


@lru_cache(maxsize=32)
def _prepared(structure: Structure, tokenizer: Tokenizer, vocab_size: int) -> LLMatcher:
    """A parser at the beginning, to be copied: large grammars take long to compile."""
    vocabulary = vocabulary_of(tokenizer, vocab_size)
    grammar = structure.compiled(tokenizer, spaced=vocabulary.space is not None)
    package = llguidance()
    limits = package.LLParserLimits(verbose_errors=False)  # which would print the whole grammar
    made: LLMatcher = package.LLMatcher(vocabulary.backend, grammar, log_level=0, limits=limits)
    if made.is_error():
        raise InputError(f"the {structure.kind.replace('_', ' ')} does not suit this model: {made.get_error().strip()}")
    return made
