"""The memory tier: trees of pieces under one byte limit, kept before each allocation.

What was used longest ago goes first: pieces that nothing hangs from, and single checkpoints. A piece counts as used
whenever a text that runs through it is looked up or stored, so shared prefixes stay the longest. What the current
operation uses, and what is pinned, stays.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from exactkv.cache.checkpoint import Checkpoint
from exactkv.cache.store.pieces import Rows, objects
from exactkv.cache.store.tree import Filed, Namespace, Node, Path, ids, nodes, walk

TOKEN_BYTES = 8


class MemoryTier:
    """``nbytes``: all that is held, ids included; never above ``max_bytes``. ``evictions``: pieces and checkpoints."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.evictions = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything but what was counted."""
        self.roots: dict[Namespace, Node] = {}
        self.nbytes = 0
        self._now = 0
        self._held: dict[int, tuple[object, int, int]] = {}  # identity -> (it, bytes, how many hold it)
        # Oldest first. A piece comes before those that it hangs from, so the first piece here is always a leaf.
        self._items: OrderedDict[int, Node | Filed] = OrderedDict()

    def begin(self) -> None:
        """A new operation: what it touches is safe from its own evictions."""
        self._now += 1

    def walk(self, namespace: Namespace, tokens: array[int]) -> Path:
        root = self.roots.get(namespace)
        return walk(root if root is not None else Node(0, ids(())), tokens)

    def touch(self, path: Path) -> None:
        """The pieces of ``path`` are used now."""
        for node, _ in reversed(path.steps):
            node.used = self._now
            self._items.move_to_end(id(node))

    def stand_on(self, filed: Filed) -> None:
        filed.used = self._now
        self._items.move_to_end(id(filed))

    def missing(self, found: dict[int, tuple[object, int]]) -> int:
        """Bytes of those objects that are not held yet."""
        return sum(size for key, (_, size) in found.items() if key not in self._held)

    def could_hold(self, nbytes: int) -> bool:
        """Whether so much more would fit if all that may go went."""
        if self.nbytes + nbytes <= self.max_bytes:
            return True
        kept: dict[int, int] = {}
        floor = 0
        for item in self._items.values():
            if self._stays(item):
                kept |= {key: size for key, (_, size) in _objects(item).items()}
                floor += TOKEN_BYTES * len(item.tokens) if isinstance(item, Node) else 0
        return floor + sum(kept.values()) + nbytes <= self.max_bytes

    def make_room(self, nbytes: int) -> bool:
        """Evict until so much more fits. False where it cannot, with nothing evicted."""
        if self.nbytes + nbytes <= self.max_bytes:
            return True
        if not self.could_hold(nbytes):
            return False
        for item in list(self._items.values()):
            if self.nbytes + nbytes <= self.max_bytes:
                break
            if self._stays(item) or id(item) not in self._items:
                continue
            if isinstance(item, Filed):
                self._release_checkpoint(item)
                self.evictions += 1
            elif not item.children:
                self._release(item)
                self.evictions += 1
        return self.nbytes + nbytes <= self.max_bytes

    def add(self, namespace: Namespace, path: Path, tokens: array[int], rows: Rows) -> Node:
        """A new piece at the end of ``path``. Room was made; the path was touched in this operation."""
        last = path.last
        if namespace not in self.roots:
            self.roots[namespace] = last = Node(0, ids(()))
        node = last.attach(tokens, path.length, rows)
        node.used = self._now
        self._hold(objects(rows))
        self.nbytes += TOKEN_BYTES * len(tokens)
        self._items[id(node)] = node
        for above, _ in reversed(path.steps):
            self._items.move_to_end(id(above))
        return node

    def add_checkpoint(self, node: Node, checkpoint: Checkpoint) -> Filed:
        """File a checkpoint in the piece that its position lies in. Room was made."""
        filed = node.checkpoints[checkpoint.position] = Filed(checkpoint, node, self._now)
        node.gone_checkpoints.discard(checkpoint.position)
        self._hold(objects((), checkpoint))
        self._items[id(filed)] = filed
        return filed

    def pin(self, path: Path) -> tuple[Node | Filed, ...]:
        """Keep the pieces of ``path`` and the two checkpoints nearest to its end, at which longer texts and the same
        one stand, until ``unpin`` is given what this returns."""
        pinned: tuple[Node | Filed, ...] = (*(node for node, _ in path.steps), *list(path.checkpoints())[-2:])
        for item in pinned:
            item.pins += 1
        return pinned

    def unpin(self, pinned: tuple[Node | Filed, ...]) -> None:
        for item in pinned:
            item.pins -= 1

    def all_nodes(self) -> list[Node]:
        return [node for root in self.roots.values() for node in nodes(root)]

    def found(self) -> list[object]:
        """Every memory and tensor that the trees keep alive, each once: looked for, not counted along."""
        items: list[Node | Filed] = []
        for node in self.all_nodes():
            items += (node, *node.checkpoints.values())
        return [thing for thing, _ in {key: v for i in items for key, v in _objects(i).items()}.values()]

    def recount(self) -> None:
        """Count all anew from the trees, after an operation that was interrupted midway."""
        found = {id(n): n for n in self.all_nodes()}
        every: dict[int, Node | Filed] = {**found, **{id(f): f for n in found.values() for f in n.checkpoints.values()}}
        order = {key: at for at, key in enumerate(self._items)}
        self._items = OrderedDict(sorted(every.items(), key=lambda item: order.get(item[0], len(order))))
        for node in reversed(found.values()):  # a piece comes before what it hangs from
            above = node.parent
            while above is not None and id(above) in self._items:
                self._items.move_to_end(id(above))
                above = above.parent
        self._held, self.nbytes = {}, 0
        for item in every.values():
            self._hold(_objects(item))
            self.nbytes += TOKEN_BYTES * len(item.tokens) if isinstance(item, Node) else 0

    # Within.

    def _stays(self, item: Node | Filed) -> bool:
        return item.pins > 0 or item.used == self._now

    def _release(self, node: Node) -> None:
        for filed in list(node.checkpoints.values()):
            self._release_checkpoint(filed)
        node.detach()
        del self._items[id(node)]
        self.nbytes -= TOKEN_BYTES * len(node.tokens)
        self._drop(objects(node.rows))

    def _release_checkpoint(self, filed: Filed) -> None:
        filed.node.lose(filed.position)
        del self._items[id(filed)]
        self._drop(objects((), filed.checkpoint))

    def _hold(self, found: dict[int, tuple[object, int]]) -> None:
        for key, (thing, size) in found.items():
            count = self._held[key][2] if key in self._held else 0
            self._held[key] = (thing, size, count + 1)
            self.nbytes += 0 if count else size

    def _drop(self, found: dict[int, tuple[object, int]]) -> None:
        for key, (thing, size) in found.items():
            count = self._held[key][2]
            if count > 1:
                self._held[key] = (thing, size, count - 1)
            else:
                del self._held[key]
                self.nbytes -= size


def _objects(item: Node | Filed) -> dict[int, tuple[object, int]]:
    return objects(item.rows) if isinstance(item, Node) else objects((), item.checkpoint)
