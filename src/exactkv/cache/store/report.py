"""What a store says of itself: results, counts, and why reuse stopped where it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exactkv.cache.cache import Cache


@dataclass(frozen=True)
class Lookup:
    """What ``PromptStore.lookup`` found. ``cache``: of one row, standing at ``cached``; ``left``: how many of the
    tokens asked for are left to feed, ``tokens[cached:]``, never none; ``reason``: why it is not more, in words."""

    cache: Cache
    cached: int
    left: int
    reason: str


@dataclass(frozen=True)
class Inserted:
    """What ``PromptStore.insert`` stored. ``tokens``: the row's; ``new``: how many of them were not in memory before;
    ``in_memory``, ``on_disk``: whether all of them are there now; ``reason``: why it was refused, else "";
    memory of 0 bytes beside a directory was not asked."""

    tokens: int
    new: int
    in_memory: bool
    on_disk: bool
    reason: str = ""


@dataclass(frozen=True)
class StoreStats:
    """Counts since the store was opened, and what it holds now.

    ``lookups`` = ``hits`` + ``misses`` (nothing was reused); of ``asked_tokens``, ``reused_tokens`` need not be fed.
    ``inserts``: of which ``refused`` could not be held in memory, and ``refused_on_disk`` there. ``bytes``: of tensors
    and token ids in memory, never more than ``max_bytes``; ``pieces``, ``checkpoints``: how many of each; ``tokens``:
    in all pieces; ``pinned``: texts. ``evictions``: pieces and checkpoints that went for want of room.
    Of the directory (0 without one): ``disk_bytes``, never more than ``directory_bytes``; ``disk_pieces``,
    ``disk_checkpoints``; ``disk_hits``: lookups that read from it; ``disk_reads``, ``disk_writes``: files;
    ``disk_evictions``; ``broken``: entries dropped as their file was missing or altered; ``disk_errors``: reads and
    writes that failed for another reason, the last one being ``last_disk_error``. ``last_refusal``: in words.
    """

    lookups: int
    hits: int
    misses: int
    asked_tokens: int
    reused_tokens: int
    inserts: int
    refused: int
    refused_on_disk: int
    bytes: int
    max_bytes: int
    pieces: int
    checkpoints: int
    tokens: int
    pinned: int
    evictions: int
    disk_bytes: int
    directory_bytes: int | None
    disk_pieces: int
    disk_checkpoints: int
    disk_hits: int
    disk_reads: int
    disk_writes: int
    disk_evictions: int
    broken: int
    disk_errors: int
    last_disk_error: str
    last_refusal: str


@dataclass
class Counts:
    """What a store counts."""

    lookups: int = 0
    hits: int = 0
    asked_tokens: int = 0
    reused_tokens: int = 0
    inserts: int = 0
    refused: int = 0
    refused_on_disk: int = 0
    disk_hits: int = 0
    disk_errors: int = 0
    last_disk_error: str = ""
    last_refusal: str = ""


@dataclass(frozen=True)
class Evicted:
    """What has gone of a text: the tokens that went on where what is stored of it ends, or a checkpoint before."""

    tokens: bool
    checkpoint: bool


def explained(
    asked: int, stored: int, cached: int, differs: bool, evicted: Evicted, others: str = "", most: int | None = None
) -> str:
    """Why ``cached`` of ``asked`` tokens are reused where ``stored`` are stored. ``differs``: a stored text goes on
    after these, with another token; ``evicted``: what stood further on has gone; ``others``: under what else it is
    stored; ``most``: the cache's max_length."""
    if not stored:
        what = (
            "its first token differs from every text stored" if differs else "nothing is stored for this model and salt"
        )
        why = f"{what}; what was stored of it was evicted" if evicted.tokens else what
        return f"nothing is reused: {why}{f'; {others}' if others else ''}"
    if cached == asked - 1:
        return f"{cached} of {asked} tokens are reused: all but the last, which is fed for its logits"
    where = "the whole text is stored"
    if most is not None and stored > most:
        stored, where = most, f"max_length is {most}"
    elif stored < asked:
        goes_on = f"the stored text differs from token {stored} on" if differs else f"the stored text ends at {stored}"
        where = f"what came after token {stored} was evicted" if evicted.tokens else goes_on
    if cached == stored:
        return f"{cached} of {asked} tokens are reused: {where}"
    why = f"no checkpoint lies between {cached} and there, and windows, chunks or recurrent layers need one to stand"
    if evicted.checkpoint:
        why = f"a checkpoint between {cached} and there was evicted"
    return f"{cached} of {asked} tokens are reused: {where}, but {why}{f'; {others}' if others else ''}"
