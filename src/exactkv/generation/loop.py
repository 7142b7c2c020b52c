"""One text: prefill the prompt, then a forward pass a token, until the model or a limit ends it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exactkv.cache import Cache
from exactkv.cache.checks import is_int, listed
from exactkv.errors import InputError
from exactkv.generation.reuse import forgets, next_stop, reuse
from exactkv.generation.sampling import GREEDY, Sampling, sample
from exactkv.models.model import Model

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or messages ({"role": ..., "content": ...}) for the model's chat template."""

PREFILL_WIDTH = 512
"""Prompt tokens a forward pass: enough to use the machine, few enough to bound memory and answer Ctrl-C."""


@dataclass(frozen=True)
class Piece:
    """What has been added since the piece before.

    ``tokens``: the ids whose text this is; an end token is among them though it has no text.
    ``finish_reason``: None but in the last piece: "stop" at an end token, "length" at max_tokens or at the
    model's maximum.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Stats:
    """What a generation has done so far, and the seconds it worked (not those its consumer took).

    ``prompt_tokens``: all of the prompt; ``cached_tokens`` of them were in the cache, ``fed_tokens`` went through the
    model. The two add up to the first but before prefill has ended, or where it was interrupted.
    ``prefill_seconds`` include choosing the first token; ``first_token_seconds`` is the time from the first
    call on, None before there is one.
    """

    prompt_tokens: int
    cached_tokens: int
    fed_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    first_token_seconds: float | None
    cache_bytes: int

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

    ``tokens``: all ids generated so far. ``cache``: holds the prompt and each of ``tokens`` but the last. Both can
    be read at any time: between pieces, after ``close()``, and after an exception or Ctrl-C, which ends the
    generation; ``cache.lengths`` then says how far it has come.
    """

    def __init__(
        self,
        model: Model,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        stop_token_ids: frozenset[int],
        cache: Cache,
        checkpoints: Sequence[int] = (),
    ):
        self.model, self.prompt, self.cache = model, tuple(prompt), cache
        # The prompt's is before its last token, whose logits anyone who comes back will want.
        self._marks = dict.fromkeys(checkpoints, "message") | {len(prompt) - 1: "prompt"} if forgets(cache) else {}
        self.max_tokens, self.sampling, self.stop_token_ids = max_tokens, sampling, stop_token_ids
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._cached = self._fed = 0
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
        )

    def _run(self) -> Generator[Piece, None, None]:
        tokenizer = self.model.tokenizer
        text_of = tokenizer.stream() if tokenizer is not None else None
        pending: list[int] = []
        token = self._first_token()
        while True:
            self.tokens.append(token)
            pending.append(token)
            self.finish_reason = self._reason_to_finish(token)
            text = ""
            if text_of is not None:
                text = text_of.step(token) if self.finish_reason != "stop" else ""
                if self.finish_reason is not None:
                    text += text_of.flush()
            if text or text_of is None or self.finish_reason is not None:
                yield Piece(text, tuple(pending), self.finish_reason)
                pending.clear()
            if self.finish_reason is not None:
                return
            started = time.perf_counter()
            token = self._chosen(self._feed([token], "last"))
            self._decode_seconds += time.perf_counter() - started

    def _first_token(self) -> int:
        """Feed what the cache lacks of the prompt, a piece a forward pass; logits are made for its last position."""
        started = time.perf_counter()
        self._check_position()
        self._cached = self._position = reuse(self.cache, self.prompt)
        last = len(self.prompt)
        logits = None
        while self._position < last:
            start, stop = self._position, next_stop(self.cache, last, PREFILL_WIDTH, self._marks)
            logits = self._feed(self.prompt[start:stop], "last" if stop == last else "none")
            if stop in self._marks:
                self.cache.checkpoint(label=self._marks[stop])
            self._prefill_seconds = time.perf_counter() - started
        token = self._chosen(logits)
        self._prefill_seconds = self._first_token_seconds = time.perf_counter() - started
        return token

    def _feed(self, tokens: Sequence[int], logits: str) -> Tensor | None:
        self._check_position()
        try:
            return self.model([tokens], cache=self.cache, logits=logits)
        finally:
            self._position = self.cache.lengths[0]
            self._fed = min(len(self.prompt), self._position) - self._cached

    def _chosen(self, logits: Tensor | None) -> int:
        assert logits is not None
        return int(sample(logits[0], self.sampling, self.cache.lengths[0]))

    def _check_position(self) -> None:
        """Raise InputError where somebody else has fed or rewound the cache since the last token."""
        if self.cache.lengths != [self._position]:
            raise InputError(
                f"the cache stands at {self.cache.lengths}, this generation had left it at {[self._position]}: "
                "something else used it meanwhile. Give each its own, such as cache.fork(1)."
            )

    def _reason_to_finish(self, token: int) -> str | None:
        if token in self.stop_token_ids:
            return "stop"
        full = self.cache.max_length is not None and self.cache.lengths[0] >= self.cache.max_length
        return "length" if full or len(self.tokens) >= self.max_tokens else None


def stream(
    model: Model,
    prompt: Prompt,
    max_tokens: int = 256,
    sampling: Sampling = GREEDY,
    stop_token_ids: Sequence[int] | None = None,
    cache: Cache | None = None,
    checkpoints: Sequence[int] = (),
) -> Generation:
    """Generate after ``prompt``: an iterator of pieces, with ``.stats``, ``.tokens`` and ``.cache``.

    A text is encoded with the tokenizer's special tokens, messages by the chat template, ids are taken as
    they are. ``stop_token_ids``: end tokens instead of the model's own (``()``: none). ``cache``: one row
    (default: a new one). What it holds of the prompt is not computed again, and what else it holds is dropped: it
    changes what a text costs, never the text. To go on after all it holds, give ``[*cache.tokens(0), *more]``.
    ``checkpoints``: positions in the prompt, such as the ends of messages, that the cache shall be able to go back to;
    the prompt's end is one always. Work is done as the iterator is advanced.
    Raises InputError, here, where an argument does not fit.
    """
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise InputError(f"max_tokens is {max_tokens!r}; expected an integer >= 1")
    if not isinstance(model, Model):
        raise InputError(f"model is a {type(model).__name__}; expected one made by exactkv.load")
    if cache is not None and not isinstance(cache, Cache):
        raise InputError(f"cache is a {type(cache).__name__}; expected one made by model.new_cache()")
    if not isinstance(sampling, Sampling):
        raise InputError(f"sampling is {sampling!r}; expected exactkv.Sampling(temperature=..., top_p=..., seed=...)")
    ids = prompt_ids(model, prompt)
    if cache is None:
        cache = model.new_cache()
    elif cache.batch_size != 1:
        raise InputError(
            f"the cache has {cache.batch_size} rows; stream generates one text: give it cache.select([row])"
        )
    model._check_cache(cache, 1, None)  # before anything is rewound
    limit = cache.max_length
    if limit is not None and len(ids) > limit:
        raise InputError(f"the prompt has {len(ids)} tokens; at most {limit} fit. Shorten it.")
    given = None if stop_token_ids is None else listed("stop_token_ids", stop_token_ids)
    if not all(is_int(i) for i in given or ()):
        raise InputError(f"stop_token_ids are {given!r}; expected token ids, which are integers")
    ends = end_token_ids(model) if given is None else frozenset(given)
    marks = listed("checkpoints", checkpoints)
    if not all(is_int(m) and 0 <= m <= len(ids) for m in marks):
        raise InputError(f"checkpoints are {marks!r}; expected positions from 0 to the prompt's length {len(ids)}")
    return Generation(model, ids, max_tokens, sampling, ends, cache, marks)


def prompt_ids(model: Model, prompt: Prompt) -> list[int]:
    """The token ids of a prompt in any of its forms. Raises InputError where it is empty or none of them."""
    given: Any = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    tokenizer, vocab_size = model.tokenizer, model.spec.vocab_size
    is_chat = isinstance(given, Sequence) and len(given) > 0 and all(isinstance(m, Mapping) for m in given)
    if isinstance(given, str) or is_chat:
        if tokenizer is None:
            raise InputError("this model has no tokenizer, so its prompt must be a list of token ids")
        ids = tokenizer.encode(given) if isinstance(given, str) else tokenizer.apply_chat_template(given)
    elif isinstance(given, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in given):
        ids = list(given)
    else:
        shown = str(given) if len(str(given)) <= 80 else f"{str(given)[:80]}…"
        raise InputError(
            f"the prompt is {shown!r}; expected one text, one list of token ids, or one list of messages "
            'like {"role": "user", "content": "Hello"}'
        )
    if not ids:
        raise InputError("the prompt is empty; expected at least one token, such as the model's bos token")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InputError(f"token id {wrong} of the prompt is outside the vocabulary: 0 to {vocab_size - 1}")
    return ids


def end_token_ids(model: Model) -> frozenset[int]:
    """The tokens that end a text: those of the model's generation config and of its tokenizer."""
    configured = model.generation_config.get("eos_token_id")
    ids = {configured} if isinstance(configured, int) else set(configured or ())
    return frozenset(ids | set(model.tokenizer.eos_token_ids if model.tokenizer is not None else ()))
