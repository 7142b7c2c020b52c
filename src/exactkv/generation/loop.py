"""One text: prefill the prompt, then a forward pass a token or a draft, until the model or a limit ends it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from exactkv.cache import Cache
from exactkv.cache.checks import is_int, listed, require
from exactkv.errors import InputError
from exactkv.generation.draft import Draft, DraftLength, guess_of, make_draft
from exactkv.generation.prompts import Prompt
from exactkv.generation.reuse import next_stop, prefill_width, reuse
from exactkv.generation.sampling import GREEDY, Logprobs, Sampling
from exactkv.generation.stopping import Stopping
from exactkv.generation.structure import Structure
from exactkv.generation.text import Piece, Text, make_text
from exactkv.models.model import Model


@dataclass(frozen=True)
class Stats:
    """What a generation has done so far, and the seconds it worked (not those its consumer took).

    ``prompt_tokens``: all of the prompt; ``cached_tokens`` of them were in the cache, ``fed_tokens`` went through the
    model. The two add up to the first but before prefill has ended, or where it was interrupted.
    ``prefill_seconds`` include choosing the first token; ``first_token_seconds`` is the time from the first
    call on, None before there is one. Of ``drafted_tokens`` guesses ``accepted_tokens`` came true.
    """

    prompt_tokens: int
    cached_tokens: int
    fed_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    first_token_seconds: float | None
    cache_bytes: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prompt_rate(self) -> float | None:
        """Prompt tokens fed a second; None before any."""
        return self.fed_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first; None before there are two."""
        return (self.generated_tokens - 1) / self.decode_seconds if self.decode_seconds else None


class Generation(Iterator[Piece]):
    """An iterator of pieces, made by ``stream``.

    ``tokens``: all ids generated so far, those of a stop string too. ``logprobs``: theirs, where asked for. ``text``:
    what the pieces said so far. ``cache``: holds the prompt and each of ``tokens`` but the last. All can be read at any
    time: between pieces, after ``close()``, and after an exception or Ctrl-C, which ends the generation;
    ``cache.lengths`` then says how far it has come. ``finish_reason`` and ``matched`` are those of the last piece.
    """

    def __init__(
        self,
        model: Model,
        text: Text,
        cache: Cache,
        checkpoints: Sequence[int] = (),
        draft: Draft | None = None,
        draft_tokens: int = 0,
    ):
        self.model, self.cache, self._text, self._draft = model, cache, text, draft
        self._length = DraftLength(draft_tokens)
        last = len(text.prompt) - 1  # the last token's logits are what anyone who comes back will want
        self._marks = dict.fromkeys(checkpoints, "message") | {last: "prompt"} if cache.spec.forgets else {}
        self._cached = self._fed = self._drafted = self._accepted = 0
        self._position = cache.lengths[0]
        self._prefill_seconds = self._decode_seconds = 0.0
        self._first_token_seconds: float | None = None
        self._pieces = self._run()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End it here. What was generated, the cache and the statistics stay."""
        self._pieces.close()

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its token ids."""
        return self._text.prompt

    @property
    def tokens(self) -> list[int]:
        """All ids generated so far."""
        return self._text.generated

    @property
    def text(self) -> str:
        """What the pieces said so far."""
        return self._text.shown

    @property
    def logprobs(self) -> list[Logprobs]:
        """Of each token, where asked for."""
        return self._text.logprobs

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen, its texts resolved to token ids."""
        return self._text.sampling

    @property
    def stopping(self) -> Stopping:
        """What ends it."""
        return self._text.stopping

    @property
    def num_logprobs(self) -> int | None:
        """Of how many top tokens the log-probability is told; None: of none, nor of those chosen."""
        return self._text.num_logprobs

    @property
    def max_tokens(self) -> int:
        """The most that may be generated."""
        return self._text.stopping.max_tokens

    @property
    def finish_reason(self) -> str | None:
        """Why it has ended; None while it goes on or where it was interrupted."""
        return self._text.ending.reason

    @property
    def matched(self) -> str | int | None:
        """The stop string or end token that ended it."""
        return self._text.ending.matched

    @property
    def stats(self) -> Stats:
        """A snapshot of the statistics."""
        return Stats(
            prompt_tokens=len(self.prompt),
            cached_tokens=self._cached,
            fed_tokens=self._fed,
            generated_tokens=len(self.tokens),
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            first_token_seconds=self._first_token_seconds,
            cache_bytes=self.cache.nbytes,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
        )

    def _run(self) -> Generator[Piece, None, None]:
        ending = self._text.ending
        ending.start()
        piece = self._prefill()
        while True:
            if piece is not None:
                yield piece
            if ending.reason is not None:
                return
            started = time.perf_counter()
            piece = self._decode()
            self._decode_seconds += time.perf_counter() - started

    def _prefill(self) -> Piece | None:
        """Feed what the cache lacks of the prompt, a piece a forward pass; logits are made for its last position."""
        started = time.perf_counter()
        self._check_position()
        prompt = self.prompt
        self._cached = self._position = reuse(self.cache, prompt)
        logits, width = None, prefill_width(self.model.device)
        while self._position < len(prompt):
            start, stop = self._position, next_stop(self.cache, len(prompt), width, self._marks)
            logits = self._feed(prompt[start:stop], "last" if stop == len(prompt) else "none")
            if stop in self._marks:
                self.cache.checkpoint(label=self._marks[stop])
            self._prefill_seconds = time.perf_counter() - started
            if self._text.ending.late:
                self._text.give_up()
                return self._piece()
        piece = self._take(logits, [])
        self._prefill_seconds = self._first_token_seconds = time.perf_counter() - started
        return piece

    def _decode(self) -> Piece | None:
        """A forward pass: the last token and a guess of what follows it."""
        guess = self._guess()
        logits = self._feed([self.tokens[-1], *guess], "all" if guess else "last")
        return self._take(logits if logits is None or not guess else logits[0], guess)

    def _piece(self) -> Piece | None:
        piece = self._text.piece()
        self._text.tell()
        return piece

    def _guess(self) -> list[int]:
        if self._draft is None:
            return []
        most = min(self._length.next(), self._text.room - 1)
        guess = guess_of(self._draft, self._text.ids, most, self.model.spec.vocab_size)
        self._drafted += len(guess)
        return guess

    def _take(self, logits: Tensor | None, guess: list[int]) -> Piece | None:
        """Choose from ``logits`` [1 + guess, V]; the cache is left with all tokens but the last."""
        assert logits is not None
        choice = self._text.choose(logits, guess)
        before = len(self.tokens)
        self._text.take(self._text.chosen(choice), choice.logprobs, guess)
        if guess:
            accepted = len(self.tokens) - before - 1
            self._accepted += accepted
            self._length.learn(len(guess), accepted)
            self.cache.rewind(len(self._text.ids) - 1)
            self._position = self.cache.lengths[0]
        return self._piece()

    def _feed(self, tokens: Sequence[int], logits: str) -> Tensor | None:
        self._check_position()
        try:
            return self.model([tokens], cache=self.cache, logits=logits)
        finally:
            self._position = self.cache.lengths[0]
            self._fed = min(len(self.prompt), self._position) - self._cached

    def _check_position(self) -> None:
        """Raise InputError where somebody else has fed or rewound the cache since the last token."""
        if self.cache.lengths != [self._position]:
            raise InputError(
                f"the cache stands at {self.cache.lengths}, this generation had left it at {[self._position]}: "
                "something else used it meanwhile. Give each its own, such as cache.fork(1)."
            )


def stream(
    model: Model,
    prompt: Prompt,
    max_tokens: int = 256,
    sampling: Sampling = GREEDY,
    stop_token_ids: Sequence[int] | None = None,
    cache: Cache | None = None,
    checkpoints: Sequence[int] = (),
    *,
    stop: str | Sequence[str] = (),
    include_stop: bool = False,
    deadline: float | None = None,
    logprobs: int | None = None,
    draft: Draft | Model | str | None = None,
    draft_tokens: int = 12,
    structure: Structure | None = None,
    show_special_tokens: bool = False,
    storage: str | None = None,
) -> Generation:
    """Generate after ``prompt``: an iterator of pieces, with ``.text``, ``.tokens``, ``.stats`` and ``.cache``.

    A text is encoded with the tokenizer's special tokens, messages by the chat template, ids are taken as
    they are. ``stop_token_ids``: end tokens instead of the model's own (``()``: none). ``cache``: one row
    (default: a new one). What it holds of the prompt is not computed again, and what else it holds is dropped: it
    changes what a text costs, never the text. To go on after all it holds, give ``[*cache.tokens(0), *more]``.
    ``checkpoints``: positions in the prompt, such as the ends of messages, that the cache shall be able to go back to;
    the prompt's end is one always. ``stop``: strings that end the text before them, ``include_stop``: after them;
    ``deadline``: seconds after which it ends, from the first step on (`Stopping`). ``logprobs``: tell the
    log-probability of each token and of so many top tokens (`Logprobs`). ``draft``: "lookup" guesses what follows from
    the text itself, a model of the same vocabulary by generating, a `Draft` its own way; at most ``draft_tokens`` are
    checked in one pass. Guesses change how fast a text comes, not the text. ``structure``: what the text must look like
    (`Structure`); where nothing can follow it ends. ``show_special_tokens``: pieces tell special tokens too, as parsers
    of tool calls need it. ``storage``: how a new cache keeps keys and values, as for `Model.new_cache` (default:
    dense); a given cache has its own, and a draft model's is dense. Work is done as the iterator is advanced.
    Raises InputError, here, where an argument does not fit.
    """
    if cache is not None and not isinstance(cache, Cache):
        raise InputError(f"cache is a {type(cache).__name__}; expected one made by model.new_cache()")
    limit = None if cache is None else cache.max_length
    text = make_text(
        model, prompt, max_tokens, sampling, stop_token_ids, stop, include_stop, deadline, logprobs, limit, structure,
        show_special_tokens,
    )  # fmt: skip
    require(is_int(draft_tokens) and draft_tokens >= 1, "draft_tokens", draft_tokens, "an integer >= 1")
    made = make_draft(draft, model, text.sampling)
    if cache is None:
        cache = model.new_cache(storage="dense" if storage is None else storage)
    elif cache.batch_size != 1:
        raise InputError(
            f"the cache has {cache.batch_size} rows; stream generates one text: give it cache.select([row])"
        )
    model._check_cache(cache, 1, storage=storage)  # before anything is rewound
    marks, count = listed("checkpoints", checkpoints), len(text.prompt)
    if not all(is_int(m) and 0 <= m <= count for m in marks):
        raise InputError(f"checkpoints are {marks!r}; expected positions from 0 to the prompt's length {count}")
    if made is not None:
        cache.slack = max(cache.slack, draft_tokens)
    return Generation(model, text, cache, marks, made, draft_tokens)
