"""Kinds F, G, H and Q: faults in exactkv's own prompt store."""

from __future__ import annotations

from collections.abc import Iterator

from exactkv.cache.store import store as prompt_store
from exactkv.cache.store import tree
from exactkv.cache.store.memory import MemoryTier
from exactkv.cache.store.pieces import Builder
from exactkv.verify.target import Target
from exactkv.verify.targets.exactkv import ExactKVTarget
from tests.faults.fault import Patches, fault, tiny
from tests.hybrid import MAMBA, hybrid_model
from tests.tiny import FULL


def hybrid(seed: int) -> Target:
    return ExactKVTarget(hybrid_model([MAMBA, FULL], seed=seed))


@fault("F", tiny(FULL, FULL), ("steps", "prefix store", "random prefixes"))
def stored_tokens_compared_by_fours(patch: Patches) -> None:
    """Where a stored text and the prompt part, the group of four tokens in which they do counts as equal."""
    common = tree.common
    patch(tree, "common", lambda a, b: min(len(a), len(b), -(-common(a, b) // 4) * 4))


@fault("G", tiny(FULL, FULL), ("steps", "owners"))
def salt_of_the_prompt_store_ignored(patch: Patches) -> None:
    """All tenants' texts hang from one tree."""
    namespace = prompt_store.namespace_of
    patch(prompt_store, "namespace_of", lambda cache, salt: namespace(cache, ""))


@fault("H", hybrid, ("steps", "prefix store", "random prefixes"))
def checkpoint_of_another_branch(patch: Patches) -> None:
    """All checkpoints of a piece are taken for those of a text that leaves it midway."""

    def faulty(self: tree.Path) -> Iterator[tree.Filed]:
        for node, _ in self.steps:
            yield from node.checkpoints.values()

    patch(tree.Path, "checkpoints", faulty)


@fault("F", tiny(FULL, FULL), ("steps", "prefix store", "random prefixes"))
def what_was_found_writes_into_the_piece(patch: Patches) -> None:
    """A cache that was found goes on in the memory of the piece, over the rows of the text that was stored."""
    add = Builder.add

    def faulty(self: Builder, rows, upto: int) -> None:
        add(self, rows, upto)
        for z, held in enumerate(rows):
            if held is not None and held.start == 0 and self.position + 8 < held.end:  # there is room
                self._memories[z] = held.memory

    patch(Builder, "add", faulty)


@fault("Q", tiny(FULL, FULL), ("steps", "random prefixes"))
def evicted_bytes_stay_in_the_count(patch: Patches) -> None:
    """What is evicted goes on being counted, so that ever less is kept."""
    drop = MemoryTier._drop

    def faulty(self: MemoryTier, found) -> None:
        before = self.nbytes
        drop(self, found)
        self.nbytes = before

    patch(MemoryTier, "_drop", faulty)
