"""What can be verified: a small protocol that an adapter of an engine implements.

An adapter subclasses `Target`, implements the three required methods and those abilities that its engine has.
An ability that is left out, or that raises `NotSupported`, is reported as not supported, never as a pass.
Arrays are numpy, logits float64 whatever the engine computes in. Tokens are Python ints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from exactkv.errors import ExactKVError

Array = NDArray[np.float64]
Tokens = Sequence[int]


class NotSupported(ExactKVError):
    """The engine does not claim to be able to do this. The message says what, in a few words."""


class Refused(ExactKVError):
    """The engine can do this in general but declined this time, by an error or by what it returned.

    Whatever was called on must be as it was before: the verifier goes on with it and checks."""


@dataclass(frozen=True)
class Layer:
    """What a layer remembers. ``kind``: "full", "sliding", "chunked", "recurrent" or "other". ``size``: the
    window (the query's own token included) or chunk, in tokens; None for the other kinds.
    ``anchors``: first positions that stay visible for ever."""

    kind: str = "full"
    size: int | None = None
    anchors: int = 0


@dataclass(frozen=True)
class Generator:
    """A way in which the engine generates. ``kind``: "plain" (one prompt), "speculative" (one prompt, drafts) or
    "batch" (several prompts at once). ``stops``: takes stop tokens. ``caches``: completions carry the cache
    they ended with. ``closes``: the stream can be closed early."""

    name: str
    kind: str = "plain"
    stops: bool = False
    caches: bool = False
    closes: bool = False


@dataclass
class Completion:
    """What a generator made of one prompt. What the engine does not tell stays None.

    ``tokens``: the new ones, the stop token included if it ended with one. ``finish_reason``: "stop" or "length".
    ``cache``: as left behind; what it holds is a prefix of prompt + tokens, as long as `Target.length` says.
    ``prompt_tokens``, ``completion_tokens``, ``cached_tokens``: the usage that the engine reports.
    ``forwarded``: positions that were really computed for it (counted in the adapter)."""

    tokens: list[int]
    finish_reason: str | None = None
    cache: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    forwarded: int | None = None


@dataclass
class Hit:
    """What a prefix store gave: a cache of the first ``length`` tokens asked for (None and 0 for a miss)."""

    cache: Any
    length: int
    reported: int | None = None  # what the store reports as reused, where that is told apart


@dataclass(frozen=True)
class Request:
    """A prompt with its own limit and stop tokens, for generators."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = field(default=())


class Target:
    """An engine with a model. Required: ``name``, ``vocab_size``, `forward`, `new_cache`, `feed`."""

    name: str = "target"
    """What is verified, in a few words."""
    engine: str = "custom"
    versions: dict[str, str] = {}  # noqa: RUF012 - set anew by each adapter, never changed in place
    """Versions of the libraries that matter."""
    vocab_size: int
    max_length: int = 1 << 30
    """The most tokens the model takes."""
    layers: tuple[Layer, ...] = ()
    """What each layer remembers, in order. Empty if not known: then reach is not probed."""
    dtype: str = "float32"
    caches: tuple[str, ...] = ("default",)
    """The kinds of cache that `new_cache` makes and that claim to be exact. The first is the usual one."""
    quantized_caches: tuple[str, ...] = ()
    """Kinds that store rows with loss: compared with one pass that reads them as stored (`quantized`)."""
    unbounded_caches: tuple[str, ...] = ()
    """Kinds that keep every row on purpose, also those that no window reaches any more."""
    generators: tuple[Generator, ...] = ()
    length_dependent: bool = False
    """Whether the arithmetic depends on how long the text is or may become (long rope, dynamic NTK)."""
    small: bool = True
    """A model so small that a hundred calls take no time; otherwise fewer and larger steps are taken."""

    # Required.

    def forward(self, rows: Sequence[Tokens]) -> Array:
        """One full forward pass without any cache over rows of equal length: logits [B, T, V]."""
        raise NotImplementedError

    def new_cache(self, kind: str | None = None, step: int | None = None, max_length: int | None = None) -> Any:
        """An empty cache of one row. ``step``: rows by which its memory grows; ``max_length``: what it must be
        able to hold. Raises NotSupported where the engine has no such setting."""
        raise NotImplementedError

    def feed(self, cache: Any, tokens: Tokens, positions: bool = False) -> Array:
        """Feed tokens after what the cache holds: logits [n, V]. The cache is changed in place.
        ``positions``: name their positions explicitly, as callers may."""
        raise NotImplementedError

    # The numbers of the model itself.

    def precise(self, rows: Sequence[Tokens]) -> Array:
        """`forward` in a wider dtype (float64; float32 for a 16-bit model), with the same weights."""
        raise NotSupported("a wider dtype")

    def jittered(self, rows: Sequence[Tokens], scale: float, seed: int) -> Array:
        """`forward` with each element of the embedded tokens multiplied by 1 + scale * u, u uniform in [-1, 1]."""
        raise NotSupported("disturbing the embedding")

    def quantized(self, kind: str, tokens: Tokens, scale: float = 0.0, seed: int = 0) -> Array:
        """One pass that reads rows as one of ``quantized_caches`` stores them: logits [T, V]. By default a feed through
        a new cache. ``scale`` other than 0: with embeddings disturbed as in `jittered`."""
        if scale:
            raise NotSupported("disturbing the embedding of a quantized pass")
        return self.feed(self.new_cache(kind), list(tokens))

    def reseeded(self, seed: int) -> Target:
        """The same model with other random weights. NotSupported where weights are real."""
        raise NotSupported("other weights")

    def hidden(self, tokens: Tokens) -> list[Array]:
        """One full pass: what goes into the first layer, then what comes out of each: L + 1 of [T, D]."""
        raise NotSupported("hidden states")

    def feed_hidden(self, cache: Any, tokens: Tokens) -> list[Array]:
        """`feed`, returning what `hidden` returns, for the tokens fed."""
        raise NotSupported("hidden states")

    # What a cache says of itself.

    def length(self, cache: Any) -> int:
        """How many tokens the cache says it holds. (A batch: see `lengths`.)"""
        raise NotSupported("a cache's length")

    def nbytes(self, cache: Any) -> int:
        """Bytes of memory that the cache holds."""
        raise NotSupported("a cache's bytes")

    # One cache.

    def rewind(self, cache: Any, count: int) -> int:
        """Take back the last ``count`` tokens; returns how many the engine says it took back (more or fewer are
        allowed, it must be true). Raises Refused where the engine declines, NotSupported if it never can."""
        raise NotSupported("rewind")

    def rewindable(self, kind: str | None, count: int) -> Any:
        """An empty cache prepared for rewinds of up to ``count`` tokens, where the engine has such a setting;
        by default a plain one."""
        return self.new_cache(kind)

    def settle(self, cache: Any) -> None:
        """Called after each round of feeding and rewinding on a `rewindable` cache, where the engine asks for it."""

    def fork(self, cache: Any) -> Any:
        """A copy that goes on by itself."""
        raise NotSupported("fork")

    def reset(self, cache: Any) -> Any:
        """The cache emptied by the engine's own means, for another text; returns it."""
        raise NotSupported("reset")

    def save(self, cache: Any, path: Path) -> None:
        """Write the cache to a file (or directory) at ``path``."""
        raise NotSupported("save and load")

    def load(self, path: Path) -> Any:
        """Read it back. Raises Refused where the engine declines the file."""
        raise NotSupported("save and load")

    def load_batch(self, path: Path, rows: int) -> Any:
        """`load` of a batch of so many rows that `save` has written."""
        raise NotSupported("save and load of batches")

    def reported_nbytes(self, cache: Any) -> int:
        """Bytes that the engine itself says the cache holds."""
        raise NotSupported("a cache's own account of its bytes")

    def identifies_model(self) -> bool:
        """Whether a saved cache claims to be refused by a model of other weights."""
        return False

    def recipe(self) -> dict[str, Any]:
        """JSON from which `exactkv.verify.targets.from_recipe` builds this target again in a new process."""
        raise NotSupported("a second process")

    # Batches. Unless said otherwise, rows may hold different numbers of tokens.

    def new_batch(self, rows: int, kind: str | None = None) -> Any:
        """An empty cache of several rows, of one of the kinds of cache."""
        raise NotSupported("batches")

    def feed_batch(self, batch: Any, rows: Sequence[Tokens]) -> list[Array]:
        """Feed each row its own tokens (perhaps none): logits [n_i, V] a row. Engines that take ragged input
        only at the start, or never none, raise NotSupported for the rest."""
        raise NotSupported("batches")

    def lengths(self, batch: Any) -> list[int]:
        """How many tokens each row of a batch is said to hold."""
        raise NotSupported("a batch's lengths")

    def select(self, batch: Any, rows: Sequence[int]) -> Any:
        """The batch with just these rows, in this order (a row may be named twice, if the engine allows);
        returns it. The old one is not used any more."""
        raise NotSupported("selecting rows")

    def join(self, caches: Sequence[Any]) -> Any:
        """One batch of all rows of caches and batches, in order. Those are not used any more."""
        raise NotSupported("joining batches")

    def extract(self, batch: Any, row: int) -> Any:
        """A row of a batch as a cache of its own. The batch goes on."""
        raise NotSupported("taking a row out of a batch")

    def rewind_batch(self, batch: Any, counts: Sequence[int]) -> list[int]:
        """As `rewind`, a number a row. Engines that can only take back the same number everywhere raise
        NotSupported for others."""
        raise NotSupported("rewinding a batch")

    # A store of prefixes.

    def new_store(self, entries: int | None = None) -> Any:
        """An empty prompt cache or prefix store, of at most ``entries`` entries if the engine can limit it."""
        raise NotSupported("a prefix store")

    def put(self, store: Any, tokens: Tokens, cache: Any, salt: str = "") -> None:
        """File a cache of ``tokens``. The cache is not used any more by the caller. ``salt`` separates what
        belongs to others (another model, tenant or adapter)."""
        raise NotSupported("a prefix store")

    def get(self, store: Any, tokens: Tokens, salt: str = "") -> Hit:
        """The best cache for a prompt of ``tokens``."""
        raise NotSupported("a prefix store")

    def store_nbytes(self, store: Any) -> tuple[int, int]:
        """What the store says it holds, and what the caches in it really hold."""
        raise NotSupported("a store's bytes")

    # Generation, greedy.

    def generate(self, generator: str, requests: Sequence[Request], close_after: int | None = None) -> list[Completion]:
        """Greedy generation with one of ``generators``. ``close_after``: close the stream when so many tokens
        have been received (of the first request)."""
        raise NotSupported("generation")

    # For reports.

    def preamble(self, functions: frozenset[str]) -> str:
        """The head of a reproduction script that runs without exactkv: imports, the model, and definitions of
        ``full(rows)``, and of those of ``new_cache``, ``feed``, ``rewind``, ... that are named in ``functions``,
        with the signatures and meanings of the methods above (without self), arrays as numpy."""
        raise NotSupported("a script")


class Factory(Protocol):
    """Makes a target of a model file, directory, hub id or config. ``seed`` is of random weights."""

    def __call__(self, model: str, *, dtype: str, seed: int) -> Target: ...


def brief(error: BaseException) -> str:
    """An error in a line: its type, and the beginning of what it says."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= 200 else f"{text[:200]} …"
    return f"{type(error).__name__}: {shown}" if text else type(error).__name__
