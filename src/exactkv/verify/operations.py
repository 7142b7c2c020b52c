"""What a schedule does, as data: so that it can be run, shrunk to the least that still fails, and printed.

Caches, batches and stores are called by names of one letter or word.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from exactkv.verify.target import Request

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """Base of all. Names of caches are strings; what is made anew is in ``into`` or ``name``."""

    def __str__(self) -> str:
        shown = ", ".join(
            f"{f.name}={_short(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default
        )
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True)
class New(Operation):
    """An empty cache. ``rewinds``: prepared for rewinds of up to so many tokens."""

    name: str
    step: int | None = None
    max_length: int | None = None
    rewinds: int | None = None


@dataclass(frozen=True)
class Feed(Operation):
    """Tokens after what the cache holds; the logits are compared with one pass."""

    name: str
    tokens: Ids
    positions: bool = False


@dataclass(frozen=True)
class Overfill(Operation):
    """Tokens beyond what the cache was made for: an error, or the right logits."""

    name: str
    tokens: Ids


@dataclass(frozen=True)
class Rewind(Operation):
    """Take back ``count`` tokens. Where the engine takes back more, what is missing is fed again."""

    name: str
    count: int


@dataclass(frozen=True)
class Settle(Operation):
    """A round of feeding and rewinding is over."""

    name: str


@dataclass(frozen=True)
class Fork(Operation):
    name: str
    into: str


@dataclass(frozen=True)
class Reset(Operation):
    name: str


@dataclass(frozen=True)
class SaveLoad(Operation):
    """Save, load in the same process as another cache."""

    name: str
    into: str


@dataclass(frozen=True)
class Elsewhere(Operation):
    """Save, load in a new process, feed there; the logits are compared."""

    name: str
    tokens: Ids


@dataclass(frozen=True)
class Damaged(Operation):
    """Save, damage the file ("truncated", "altered") or take another model ("foreign"): loading must be refused."""

    name: str
    how: str


@dataclass(frozen=True)
class NewBatch(Operation):
    name: str
    rows: int


@dataclass(frozen=True)
class FeedBatch(Operation):
    name: str
    rows: tuple[Ids, ...]


@dataclass(frozen=True)
class RewindBatch(Operation):
    name: str
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Select(Operation):
    name: str
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Join(Operation):
    """All rows of caches and batches, in order, in one batch; the sources are gone."""

    names: tuple[str, ...]
    into: str


@dataclass(frozen=True)
class Extract(Operation):
    name: str
    row: int
    into: str


@dataclass(frozen=True)
class NewStore(Operation):
    name: str
    entries: int | None = None


@dataclass(frozen=True)
class Put(Operation):
    """File a cache under what it holds; the cache is gone."""

    store: str
    name: str
    salt: str = ""


@dataclass(frozen=True)
class Get(Operation):
    """Ask for a prompt, feed what is left of it and ``then``; compared all along. ``least``: tokens that must be
    reused at least (where every layer can stand there). ``foreign``: nothing may be found."""

    store: str
    tokens: Ids
    into: str
    then: Ids = ()
    salt: str = ""
    least: int = 0
    foreign: bool = False


@dataclass(frozen=True)
class Bytes(Operation):
    """Note how many bytes the cache holds. ``limit``: the growth allowed per token since the last note, as a
    share of what a token took before the first note (0: none)."""

    name: str
    growth: float | None = None


@dataclass(frozen=True)
class Generate(Operation):
    """Greedy generation; tokens, reasons, counts, and the caches left behind are compared."""

    generator: str
    requests: tuple[Request, ...]
    close_after: int | None = None


def _short(value: object) -> str:
    if isinstance(value, tuple) and len(value) > 8 and all(isinstance(v, int) for v in value):
        return f"<{len(value)} tokens {value[0]}, {value[1]}, … {value[-1]}>"
    if isinstance(value, tuple) and any(isinstance(v, (tuple, Request)) for v in value):
        return "[" + ", ".join(_short(v) for v in value) + "]"
    if isinstance(value, Request):
        stop = f", stop={list(value.stop)}" if value.stop else ""
        return f"prompt {_short(value.prompt)}, {value.max_tokens} tokens{stop}"
    return repr(value)
