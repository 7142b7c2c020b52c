"""The tree of stored texts. An edge is a piece: a stretch of tokens, with what is kept for it.

A text that leaves a piece midway hangs from that place; the piece is not cut, so that what it keeps is one block of
memory, and one file. Children are found by the position at which they begin and their first token, and whatever is
found is confirmed token by token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from exactkv.cache.checkpoint import Checkpoint
from exactkv.cache.run import Segment

MOST_REMEMBERED = 64
"""Places of evicted pieces and checkpoints that a piece remembers, for explanations."""


class Namespace(NamedTuple):
    """What separates entries that must never meet. ``salt``: a hash of what was given, "" for none."""

    identity: str
    storage: str
    dtype: str
    device: str
    salt: str


@dataclass(eq=False, slots=True)
class Filed:
    """A checkpoint in the tree. ``used``: the number of the operation that last stood on it."""

    checkpoint: Checkpoint
    node: Node
    used: int = 0
    pins: int = 0

    @property
    def position(self) -> int:
        return self.checkpoint.position


@dataclass(eq=False, slots=True)
class Node:
    """The tokens from ``start`` on, and for each zone of the model the rows that they add to it; None where they add
    none. ``children``: by (position where they begin, first token). ``gone``: such keys of evicted children."""

    start: int
    tokens: array[int]
    parent: Node | None = None
    rows: tuple[Segment | None, ...] = ()
    children: dict[tuple[int, int], Node] = field(default_factory=dict)
    checkpoints: dict[int, Filed] = field(default_factory=dict)
    used: int = 0
    pins: int = 0
    gone: set[tuple[int, int]] = field(default_factory=set)
    gone_checkpoints: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def attach(self, tokens: array[int], at: int, rows: tuple[Segment | None, ...]) -> Node:
        """A new child that begins at ``at``, where no child with that first token is."""
        child = Node(at, tokens, self, rows)
        self.children[at, tokens[0]] = child
        self.gone.discard((at, tokens[0]))
        return child

    def detach(self) -> None:
        if self.parent is not None:
            key = (self.start, self.tokens[0])
            del self.parent.children[key]
            if len(self.parent.gone) < MOST_REMEMBERED:
                self.parent.gone.add(key)

    def lose(self, position: int) -> None:
        del self.checkpoints[position]
        if len(self.gone_checkpoints) < MOST_REMEMBERED:
            self.gone_checkpoints.add(position)


class Path(NamedTuple):
    """The longest stored prefix of a text: ``steps`` are (piece, where the text leaves it), from the root's first
    child on; ``length``: how many tokens agree; ``last``: the piece at its end, the root if nothing agrees."""

    steps: tuple[tuple[Node, int], ...]
    length: int
    last: Node

    def checkpoints(self) -> Iterator[Filed]:
        """Those of this text, in order of position; none of a text that branched off before."""
        for node, end in self.steps:
            for position in sorted(node.checkpoints):
                if node.start < position <= end:
                    yield node.checkpoints[position]

    def node_at(self, position: int) -> Node:
        """The piece that holds the token before ``position``, 0 < position <= length."""
        return next(node for node, end in self.steps if node.start < position <= end)


def ids(tokens: Sequence[int]) -> array[int]:
    return array("q", tokens)


def common(a: array[int], b: array[int]) -> int:
    """How many first tokens agree."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low = 0
    while n - low > 1:  # a[:low] agrees, a[:n] does not
        middle = (low + n) // 2
        low, n = (middle, n) if a[low:middle] == b[low:middle] else (low, middle)
    return low


def walk(root: Node, tokens: array[int]) -> Path:
    """Follow ``tokens`` from the root as far as they are stored."""
    steps: list[tuple[Node, int]] = []
    node, at = root, 0
    while at < len(tokens):
        child = node.children.get((at, tokens[at]))
        if child is None:
            break
        if steps:
            steps[-1] = (node, at)
        agreed = common(child.tokens, tokens[at : at + len(child.tokens)])
        if not agreed:
            break
        node, at = child, at + agreed
        steps.append((node, at))
    return Path(tuple(steps), at, node)


def nodes(root: Node) -> Iterator[Node]:
    """Every piece below ``root``, parents first."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()
