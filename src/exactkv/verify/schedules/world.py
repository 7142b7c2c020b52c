"""What schedules are built from: a text, the sizes at which something happens, and the words to write operations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from exactkv.verify import operations as ops
from exactkv.verify.operations import Feed, Ids, Operation
from exactkv.verify.target import Generator, Target

Case = list[Operation]


@dataclass
class World:
    """``text``: the main text. ``bounds``: windows and chunks of the target's layers that fit into it, ascending.
    ``greedy``: the tokens that greedy decoding gives after a prompt. ``generator``: whose turn it is, in
    schedules of generation."""

    target: Target
    text: Ids
    seed: int
    greedy: Callable[[Sequence[int], int], list[int]]
    generator: Generator = field(default_factory=lambda: Generator(""))
    bounds: list[int] = field(init=False)
    vocab: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = {layer.size for layer in self.target.layers if layer.size is not None}
        self.bounds = sorted(size for size in sizes if 1 < size < len(self.text))
        self.vocab = self.target.vocab_size

    @property
    def bound(self) -> int:
        """The largest window or chunk; 8 where there is none, or none that is known."""
        return self.bounds[-1] if self.bounds else min(8, len(self.text) // 4)

    @property
    def small(self) -> bool:
        return self.target.small

    def random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")

    def other(self, count: int, name: str) -> Ids:
        """Another text."""
        return random_text(self.vocab, count, f"{self.seed} {name}")

    def places(self, *wanted: int) -> list[int]:
        """Lengths worth standing at: those ``wanted``, and those around every bound, within the text."""
        around = {b * m + d for b in self.bounds or [self.bound] for m in (1, 2) for d in (-1, 0, 1)}
        top = len(self.text) - 8
        found = sorted(n for n in {*wanted, *around} if 1 <= n <= top)
        return found if self.small else found[:: max(1, len(found) // 3)]


def random_text(vocab: int, count: int, name: str) -> Ids:
    """Random token ids, without id 0: it often is padding, whose embedding is zero."""
    drawn = random.Random(name)
    return tuple(drawn.randrange(1, vocab) for _ in range(count))


def steps(name: str, tokens: Sequence[int], positions: bool = False) -> Case:
    return [Feed(name, (t,), positions) for t in tokens]


def pieces(name: str, tokens: Sequence[int], sizes: Iterable[int], positions: bool = False) -> Case:
    """``tokens`` in pieces of these sizes; what is left over is one more."""
    case: Case = []
    at = 0
    for size in sizes:
        if at < len(tokens):
            case.append(Feed(name, tuple(tokens[at : at + size]), positions))
            at += size
    if at < len(tokens):
        case.append(Feed(name, tuple(tokens[at:]), positions))
    return case


def walk(world: World, name: str, tokens: Sequence[int], start: int = 0, positions: bool = False) -> Case:
    """``tokens`` from ``start`` on, step by step where that is cheap; else in steps around every bound."""
    if world.small:
        return steps(name, tokens[start:], positions)
    case: Case = []
    at = start
    for bound in [*world.bounds, *(2 * b for b in world.bounds), len(tokens)]:
        near = max(at, bound - 6)
        if near > at:
            case.append(Feed(name, tuple(tokens[at : min(near, len(tokens))]), positions))
        for p in range(near, min(bound + 6, len(tokens))):
            case.append(Feed(name, (tokens[p],), positions))
        at = max(at, min(bound + 6, len(tokens)))
    return case


@dataclass(frozen=True)
class Schedule:
    """A family of operation sequences for some kinds of fault. ``on``: "each" kind of cache, "first" (the usual
    one), "quantized" kinds, or "generators"."""

    name: str
    kinds: str
    about: str
    build: Callable[[World], list[Case]]
    on: str = "each"


__all__ = ["Case", "Schedule", "World", "ops", "pieces", "random_text", "steps", "walk"]
