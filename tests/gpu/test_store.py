"""The prompt store on a GPU: hot equals cold there, and what one device has written another finds on the disk."""

from __future__ import annotations

import pytest
import torch

from exactkv import PromptStore
from tests.cache.helpers import MIXED
from tests.cache.store.helpers import assert_hot_is_cold, check, stored
from tests.tiny import random_tokens, tiny_model

pytestmark = pytest.mark.gpu
TEXT = random_tokens(700, 3)


@pytest.mark.parametrize("merge", [None, True, False])
def test_hot_is_cold(merge, tmp_path):
    model = tiny_model(MIXED, torch.float32, device="cuda")
    with PromptStore(directory=tmp_path, merge=merge) as store:
        stored(store, model, TEXT, every=100)
        for asked in (TEXT, [*TEXT, 1, 2], [*TEXT[:250], 5, 6]):
            assert_hot_is_cold(model, store.lookup(model, asked), asked, 5e-6)
        check(store)


@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_the_disk_has_no_device(first, second, tmp_path):
    with PromptStore(directory=tmp_path) as store:
        stored(store, tiny_model(MIXED, device=first), TEXT)
        model = tiny_model(MIXED, device=second)
        found = store.lookup(model, TEXT)
        assert found.cached == len(TEXT) - 1
        assert_hot_is_cold(model, found, TEXT)
