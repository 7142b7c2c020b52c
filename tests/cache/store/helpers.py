"""What the tests of the store share: a model a pattern, filled stores, and the questions whether reuse is exact and
whether a store's own account of itself is true."""

from __future__ import annotations

from exactkv import PromptStore
from exactkv.cache.store.memory import TOKEN_BYTES
from exactkv.cache.store.pieces import tensor_bytes
from exactkv.models.random import random_weights
from exactkv.models.spec import DecoderSpec, LatentAttentionSpec, LayerSpec, MlpSpec, RopeSpec
from tests.cache.helpers import MORE, feed
from tests.hybrid import MAMBA, MAMBA2, hybrid_model
from tests.tiny import FULL, VOCAB, Model, chunk, random_tokens, tiny_model, torch, window


def latent_model(dtype: torch.dtype = torch.float64) -> Model:
    """Multi-head latent attention, in a full and a windowed layer."""
    layers = tuple(
        LayerSpec(LatentAttentionSpec(p, 4, None, 8, 4, 4, 6, 8**-0.5, RopeSpec(4, 10_000.0)), MlpSpec(48, "silu"))
        for p in (FULL, window(5))
    )
    spec = DecoderSpec("latent", VOCAB, 32, layers, 1e-6, 4096, tied_head=False)
    return Model(spec, random_weights(spec, 0, dtype, gain=1.5))


MODELS = {
    "full": tiny_model([FULL, FULL]),
    "sliding": tiny_model([window(6), FULL, window(1)]),
    "chunked": tiny_model([chunk(8), FULL, chunk(5)]),
    "only chunked": tiny_model([chunk(8)]),
    "anchors": tiny_model([window(4, anchors=2), chunk(6, anchors=3), FULL]),
    "recurrent": hybrid_model([MAMBA2, MAMBA]),
    "hybrid": hybrid_model(),
    "latent": latent_model(),
}
FREE = ("full",)
"""Those whose layers stand anywhere."""


def filled(model, tokens, every=None, **options):
    """A cache of ``tokens``, with a checkpoint at each multiple of ``every``."""
    cache, at = model.new_cache(**options), 0
    while at < len(tokens):
        end = min(len(tokens), (at // every + 1) * every if every else len(tokens))
        feed(model, cache, tokens[at:end])
        at = end
        if every and at % every == 0:
            cache.checkpoint()
    return cache


def stored(store, model, tokens, salt="", every=None):
    return store.insert(filled(model, tokens, every), salt=salt)


def assert_hot_is_cold(model, found, tokens, bound=1e-10):
    """What is left, and more, fed to the cache that was found gives what one pass gives."""
    assert found.cached + found.left == len(tokens) and found.left >= 1
    assert found.cache.lengths == [found.cached] and found.cache.tokens(0) == tokens[: found.cached]
    found.cache.check_integrity()
    logits = [feed(model, found.cache, tokens[found.cached :])[0], feed(model, found.cache, MORE)[0]]
    whole = model([tokens + MORE])[0, found.cached :]
    assert (torch.cat(logits) - whole).abs().max() <= bound * whole.abs().max()
    found.cache.check_integrity()


def check(store: PromptStore) -> None:
    """The store's account of itself is true, and its limits hold."""
    memory, stats = store._memory, store.stats()
    assert stats.bytes == tensor_bytes(memory.found()) + TOKEN_BYTES * stats.tokens <= stats.max_bytes
    order = {key: at for at, key in enumerate(memory._items)}
    for node in memory.all_nodes():
        assert node.parent in memory.roots.values() or order[id(node)] < order[id(node.parent)]
        assert all(id(filed) in order for filed in node.checkpoints.values())
        assert all(node.start < position <= node.end for position in node.checkpoints)
    assert len(order) == stats.pieces + stats.checkpoints
    held = dict(memory._held)
    memory.recount()
    assert memory.nbytes == stats.bytes and memory._held.keys() == held.keys()
    assert stats.lookups == stats.hits + stats.misses and stats.reused_tokens <= stats.asked_tokens
    if (disk := store._disk) is not None:
        on_disk = sum(f.stat().st_size for f in disk.directory.iterdir() if not f.name.startswith("index."))
        assert on_disk <= stats.disk_bytes
        assert stats.directory_bytes is None or stats.disk_bytes <= stats.directory_bytes


__all__ = ["FREE", "MODELS", "assert_hot_is_cold", "check", "filled", "random_tokens", "stored"]
