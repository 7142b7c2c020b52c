"""What the tests of the cache share: a mix of patterns, ragged feeding, and the question whether going on is exact."""

from __future__ import annotations

from tests.tiny import FULL, chunk, random_tokens, window

MIXED = [FULL, window(6), chunk(8), window(4, anchors=2)]


def feed(model, cache, *rows, lengths=None):
    width = max(len(r) for r in rows)
    counts = [len(r) for r in rows] if lengths is None else lengths
    return model([r + [0] * (width - len(r)) for r in rows], cache=cache, lengths=counts)


MORE = random_tokens(5, seed=9)


def assert_exact(model, cache, more=MORE):
    """Whatever is fed next gives what one forward pass over the row's tokens gives."""
    lengths, tokens = cache.lengths, [cache.tokens(r) for r in range(cache.batch_size)]
    logits = feed(model, cache, *([more] * cache.batch_size))
    for r, ids in enumerate(tokens):
        whole = model([ids + more])[0, lengths[r] :]
        assert (logits[r] - whole).abs().max() <= 1e-10 * whole.abs().max()
