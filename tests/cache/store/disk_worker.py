"""Other processes that use a store's directory. Run by `test_processes`."""

from __future__ import annotations

import random
import sys

import torch

from exactkv import PromptStore
from tests.cache.helpers import feed
from tests.cache.store.helpers import MODELS, filled
from tests.tiny import random_tokens


def text_of(number: int) -> list[int]:
    """Texts that share beginnings."""
    return random_tokens(12, number % 5) + random_tokens(4 + number % 9, 100 + number)


def write(directory: str, first: int, limit: int | None = None) -> None:
    """Store one text after the other, and say of each when it is finished; until killed."""
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    model = MODELS["hybrid"]
    with PromptStore(directory=directory, directory_bytes=limit) as store:
        print("ready", flush=True)
        for number in range(first, first + 10_000):
            done = store.insert(filled(model, text_of(number)))
            assert done.on_disk, done
            print(number, flush=True)


def share(directory: str, seed: int, rounds: int, limit: int) -> None:
    """Look up and store random texts; every hit must be exact."""
    drawn, model = random.Random(seed), MODELS["sliding"]
    reused = 0
    with PromptStore(max_bytes=8_000, directory=directory, directory_bytes=limit) as store:
        for _ in range(rounds):
            asked = [drawn.randint(1, 2) for _ in range(drawn.randint(1, 12))]
            found = store.lookup(model, asked)
            logits = feed(model, found.cache, asked[found.cached :])[0, -1]
            whole = model([asked])[0, -1]
            assert (logits - whole).abs().max() <= 1e-10 * whole.abs().max()
            store.insert(found.cache)
            reused += found.cached
            stats = store.stats()
            assert stats.disk_bytes <= limit and stats.disk_errors == 0, stats
        print(reused, store.stats().broken, flush=True)


if __name__ == "__main__":
    share(sys.argv[1], *map(int, sys.argv[2:]))
