"""Kind N: whatever is done with a quantized cache commutes with its storage; decode = one pass with that storage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exactkv.cache as cache_package
from exactkv.cache import CheckpointPolicy, RowTables, load_cache
from exactkv.cache.store import PromptStore
from exactkv.errors import InputError, LoadError
from exactkv.models.model import Model
from exactkv.models.random import random_weights
from exactkv.models.spec import DecoderSpec, LatentAttentionSpec, LayerSpec, MlpSpec, RopeSpec
from tests.cache.test_machine import CacheMachine
from tests.hybrid import hybrid_model
from tests.tiny import FULL, VOCAB, chunk, random_tokens, tiny_model, window, with_ops

STORAGES = ["int8", "int4", "int8:4", "int4:4", "int4:3"]
PATTERNS = [FULL, window(5), chunk(8), window(4, anchors=2)]
TINY = tiny_model(PATTERNS)


def latent_model():
    """Multi-head latent attention: rows of one head, a latent of 8 beside a rotated key of 4; full, and in a window."""
    layers = tuple(
        LayerSpec(
            LatentAttentionSpec(pattern, 4, None, 8, 6, 4, 6, 10**-0.5, RopeSpec(4, 10_000.0)), MlpSpec(48, "silu")
        )
        for pattern in (FULL, window(5))
    )
    spec = DecoderSpec("latent", VOCAB, 32, layers, 1e-6, 512, tied_head=False)
    return Model(spec, random_weights(spec, 0, torch.float64, gain=1.5))


MODELS = {"patterns": TINY, "latent": latent_model(), "recurrent": hybrid_model()}


def assert_equal(found, expected):
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


def assert_goes_on(model, cache, more=(5, 9, 2)):
    name, texts, at = cache.storage.name, [cache.tokens(r) for r in range(cache.batch_size)], cache.lengths
    found = model([list(more)] * cache.batch_size, cache=cache)
    cache.check_integrity()
    for r, ids in enumerate(texts):
        assert_equal(found[r], model([[*ids, *more]], storage=name)[0, at[r] :])


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_fast_pass_is_the_reference_and_not_the_dense_one(which, storage):
    tokens, model = [random_tokens(30)], MODELS[which]
    whole = model(tokens, storage=storage)
    assert_equal(whole, with_ops(model)(tokens, storage=storage))
    off = float((whole - model(tokens)).abs().max() / whole.abs().max())
    assert 1e-4 < off < 1.0, "there is a loss, and the storage is what the pass reads"


@settings(max_examples=40, deadline=None)
@given(
    which=st.sampled_from(sorted(MODELS)),
    storage=st.sampled_from(STORAGES),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    step=st.sampled_from([1, 3, 256]),
    reserve=st.booleans(),
)
def test_any_pieces_are_one_pass(which, storage, pieces, step, reserve):
    model, text = MODELS[which], random_tokens(sum(pieces), seed=len(pieces))
    cache = model.new_cache(storage=storage, step=step, max_length=len(text) if reserve else None)
    logits, at = [], 0
    for n in pieces:
        logits.append(model([text[at : at + n]], cache=cache))
        cache.check_integrity()
        at += n
    assert_equal(torch.cat(logits, dim=1), model([text], storage=storage))


class QuantizedMachine(CacheMachine):
    """All operations in any order, rows of two groups a head among them."""

    reference = with_ops(TINY)
    storage = "int4:4"

    class _Model:
        """The tiny model, whose new caches are quantized."""

        def new_cache(self, *args, **options):
            return TINY.new_cache(*args, storage=QuantizedMachine.storage, **options)

        def __call__(self, *args, **options):
            return TINY(*args, **options)

    model, last_layer = _Model(), len(PATTERNS) - 1

    def one_pass(self, ids):
        key = tuple(ids)
        if key not in self.expected:
            self.expected[key] = self.reference([ids], storage=self.storage)[0]
        return self.expected[key]


TestQuantizedMachine = QuantizedMachine.TestCase
TestQuantizedMachine.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("storage", ["int8:4", "int4:4"])
def test_two_rows_and_the_longer_leaves(storage):
    cache = TINY.new_cache(2, storage)
    TINY([random_tokens(20, 1), [*random_tokens(7, 2), *[0] * 13]], cache=cache, lengths=[20, 7])
    cache = cache.drop([0])
    assert_goes_on(TINY, cache)
    other = TINY.new_cache(1, storage)
    TINY([random_tokens(11, 3)], cache=other)
    joined = cache_package.join([other, cache, other.fork(2)]).select([3, 1, 0, 0])
    assert joined.lengths == [11, 10, 11, 11]
    assert_goes_on(TINY, joined)


@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize("which", MODELS)
def test_rewound_rows_are_written_again_with_scales_of_their_own(which, storage):
    """What is rewound has other magnitudes than what is written in its place."""
    model = MODELS[which]
    cache = model.new_cache(storage=storage, slack=6, checkpoints=CheckpointPolicy(every=8))
    for _ in range(3):
        model([random_tokens(8, 4)], cache=cache)
    for to in (20, 17, 8):
        reached = cache.rewind(to)
        assert reached == cache.lengths
        assert_goes_on(model, cache)
    assert reached == [8]


@pytest.mark.parametrize("storage", ["int8", "int4:4"])
@pytest.mark.parametrize("which", MODELS)
def test_files_go_on_bit_for_bit_and_keep_their_storage(which, storage, tmp_path):
    model = MODELS[which]
    cache = model.new_cache(2, storage, checkpoints=CheckpointPolicy(every=8))
    for _ in range(3):
        model([random_tokens(8, 1), random_tokens(8, 2)], cache=cache)
    cache.save(tmp_path / "file")
    loaded = load_cache(tmp_path / "file", model)
    assert loaded.storage == cache.storage and loaded.nbytes == cache.nbytes
    assert cache_package.describe_file(tmp_path / "file")["storage"] == storage
    assert torch.equal(model([[1], [2]], cache=loaded), model([[1], [2]], cache=cache))
    assert loaded.rewind(16) == cache.rewind(16) == [16, 16]
    assert_goes_on(model, loaded)


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("which", MODELS)
def test_a_store_keeps_storages_apart_and_hot_is_cold(which, merge, tmp_path):
    model, text = MODELS[which], random_tokens(40)
    for store in (PromptStore(merge=merge), PromptStore(0, directory=tmp_path, merge=merge)):
        for storage in ("int8", "int4:4"):
            cache = model.new_cache(storage=storage, checkpoints=CheckpointPolicy(every=8))
            for at in range(0, 32, 8):
                model([text[at : at + 8]], cache=cache)
            store.insert(cache)
            for prompt in (text, text[:20], text[:32], [*text[:18], 3, 4, 5]):
                found = store.lookup(model, prompt, storage=storage)
                assert found.cached >= 8 and found.cache.storage.name == storage
                assert_goes_on(model, found.cache, prompt[found.cached :])
        assert store.lookup(model, text).cached == 0, "dense"
        assert store.lookup(model, text, storage="int4").cached == 0, "other groups"


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_poison_is_in_the_scales_and_leaks_show(storage):
    cache = TINY.new_cache(storage=storage, step=64)
    TINY([random_tokens(6)], cache=cache)
    cache.begin(1)
    run = cache._rows[0].runs[0]
    scale = run.memory.buffers[0]["k.scale"]
    assert scale[:, 6:].isnan().all() and scale[:, :6].isfinite().all()
    read = cache.storage.reader(run.memory.buffers[0], "k")
    assert read[:, 6:].isnan().all() and read[:, :6].isfinite().all()


@pytest.mark.parametrize("storage", ["dense", "int8", "int4", "int4:4"])
def test_bytes_are_the_formula(storage):
    cache = TINY.new_cache(storage=storage, max_length=100)
    per_row = {"dense": 2 * 2 * 8 * 8, "int8": 2 * 2 * (8 + 2), "int4": 2 * 2 * (4 + 4), "int4:4": 2 * 2 * (4 + 8)}
    rows = 100 + (5 + 1) + (8 + 2) + (2 + 4 + 1)  # full; windows and chunk with a quarter; anchors
    assert cache.nbytes == rows * per_row[storage]
    assert cache.most_nbytes(100) == cache.nbytes
    assert ("" if storage == "dense" else storage) in repr(cache)


def test_the_pass_takes_the_storage_of_its_cache():
    cache = TINY.new_cache(storage="int8")
    TINY([[1, 2]], cache=cache, storage="int8:32")
    with pytest.raises(InputError, match="the cache's is 'int8'"):
        TINY([[1]], cache=cache, storage="int4")
    with pytest.raises(InputError, match="storage is 'q8'"):
        TINY([[1]], storage="q8")
    with pytest.raises(InputError, match="storage"):
        cache_package.join([cache, TINY.new_cache()])


def test_kernels_of_captured_steps_decline():
    model = tiny_model([FULL, window(5)])
    for storage in ("dense", "int4"):
        cache = model.new_cache(storage=storage)
        model([[1, 2, 3]], cache=cache)
        why = RowTables.why_not(cache.begin(1))
        assert (why is None) == (storage == "dense")
        assert storage == "dense" or storage in why


def test_a_file_of_another_storage_that_claims_this_one_is_refused(tmp_path, monkeypatch):
    cache = TINY.new_cache(storage="int8")
    TINY([[1, 2, 3]], cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(type(cache.storage), "name", "int4")
        cache.save(tmp_path / "file")
    with pytest.raises(LoadError, match="does not hold"):
        load_cache(tmp_path / "file", TINY)
