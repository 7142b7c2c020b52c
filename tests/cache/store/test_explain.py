"""Why reuse stopped: the words are the same whether a text is in memory or on the disk alone, also after a restart."""

from __future__ import annotations

import pytest

from exactkv import PromptStore
from exactkv.cache.store import writer
from exactkv.models.random import random_weights
from exactkv.models.spec import AttentionSpec, DecoderSpec, DynamicNtk, LayerSpec, MlpSpec, RopeSpec
from tests.cache.store.helpers import MODELS, filled, stored
from tests.tiny import FULL, VOCAB, Model, random_tokens, torch

TEXT = [*random_tokens(21, 3), *random_tokens(19, 4)]
MODEL = MODELS["full"]
OTHER = (TEXT[21] + 1) % 50


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(writer, "PIECE_TOKENS", 7)


def told(store: PromptStore, tokens: list[int], model=MODEL) -> str:
    words = store.explain(model, tokens)
    assert words.startswith(store.lookup(model, tokens).reason)
    return words


@pytest.mark.parametrize("where", ["memory", "disk", "disk anew"])
def test_where_texts_part(where, tmp_path):
    store = PromptStore() if where == "memory" else PromptStore(0, tmp_path)
    stored(store, MODEL, TEXT)
    if where == "disk anew":
        store.close()
        store = PromptStore(0, tmp_path)
    at_a_piece, within = [*TEXT[:21], OTHER, 1], [*TEXT[:24], (TEXT[24] + 1) % 50, 1]
    assert "differs from token 21 on" in told(store, at_a_piece)
    assert "differs from token 24 on" in told(store, within)
    assert "its first token differs" in told(store, [(TEXT[0] + 1) % 50, 1])
    assert "the stored text ends at 40" in told(store, [*TEXT, 1, 2])
    assert "nothing is stored for this model" in told(store, TEXT, MODELS["latent"])


@pytest.mark.parametrize("again", [False, True])
def test_what_was_evicted_from_the_disk(again, tmp_path):
    """By any process, such as `exactkv cache prune`; stored again, it is no longer told; nor when all was cleared."""
    store = PromptStore(0, tmp_path)
    stored(store, MODEL, TEXT)
    half = store.stats().disk_bytes // 2
    with PromptStore(0, tmp_path, directory_bytes=half):
        pass
    if again:
        store.close()
        store = PromptStore(0, tmp_path)
    length = store.lookup(MODEL, [*TEXT, 1]).cached
    assert 0 < length < 40
    assert f"what came after token {length} was evicted" in told(store, [*TEXT, 1])
    stored(store, MODEL, TEXT)
    assert "evicted" not in told(store, [*TEXT, 1])
    with PromptStore(0, tmp_path, directory_bytes=0):
        pass
    assert "what was stored of it was evicted" in told(store, TEXT)
    store.clear()
    assert "evicted" not in told(store, TEXT)


def test_a_checkpoint_that_was_evicted_from_the_disk(tmp_path):
    model = MODELS["sliding"]
    with PromptStore(0, tmp_path) as store:
        stored(store, model, TEXT, every=20)
        db = store._disk.index
        assert store.lookup(model, [*TEXT[:30], OTHER]).cached == 20
        (mark,) = db.db.execute("SELECT id FROM marks WHERE position = 20").fetchone()
        with db.writing():
            db.db.execute("UPDATE pieces SET used = 1e20")
            db.db.execute("UPDATE marks SET used = 1e20 WHERE id != ?", (mark,))
        size = db.total()
        assert store._disk.prune(size - 1)[0] == 1
        assert "a checkpoint between 0 and there was evicted" in told(store, [*TEXT[:30], OTHER], model)
        assert "evicted" not in told(store, [*TEXT[:18], OTHER], model)  # it would not have helped


def test_another_rope_variant_is_no_other_model():
    """A dynamic rope depends on max_length: the weights are the same."""
    rope = RopeSpec(8, 10_000.0, scaling=DynamicNtk(2.0, 64))
    layer = LayerSpec(AttentionSpec(FULL, 2, 1, 8, 8**-0.5, rope), MlpSpec(32, "silu"))
    spec = DecoderSpec("tiny", VOCAB, 16, (layer,), 1e-6, 4096, tied_head=False)
    model = Model(spec, random_weights(spec, 0, torch.float64))
    with PromptStore() as store:
        store.insert(filled(model, TEXT, max_length=100))
        words = store.explain(model, TEXT, max_length=4000)
        assert "40 tokens of it are stored under another rope variant (by max_length)" in words
        assert "another model" not in words
