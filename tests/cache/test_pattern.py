"""Patterns: monotone, and one function decides what is visible, in the mask, the reference and the fast path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exactkv.cache import AttentionPattern, ChunkedAttention, FullAttention, SlidingWindow, visible
from exactkv.errors import InputError
from exactkv.ops.torch import query_blocks
from tests.tiny import FULL, chunk, random_tokens, tiny_model, window

anchors = st.integers(0, 5)
patterns = st.one_of(
    st.builds(FullAttention, anchors=anchors),
    st.builds(SlidingWindow, anchors=anchors, window=st.integers(1, 20)),
    st.builds(ChunkedAttention, anchors=anchors, chunk_size=st.integers(1, 20)),
)


def plainly_visible(pattern: AttentionPattern, query: int, key: int) -> bool:
    """The definitions in words, written a second time and without first_visible."""
    if key > query:
        return False
    if key < pattern.anchors:
        return True
    match pattern:
        case SlidingWindow():
            return query - key < pattern.window
        case ChunkedAttention():
            return query // pattern.chunk_size == key // pattern.chunk_size
    return True


@given(patterns)
def test_first_visible_never_decreases_and_is_at_most_the_query(pattern):
    firsts = [pattern.first_visible(p) for p in range(80)]
    assert firsts == sorted(firsts)
    assert all(0 <= first <= p for p, first in enumerate(firsts))
    assert torch.equal(pattern.first_visible(torch.arange(80)), torch.tensor(firsts))


@given(patterns)
def test_visible_mask_is_the_definition(pattern):
    mask = visible(pattern, torch.arange(50), torch.arange(50))
    expected = [[plainly_visible(pattern, i, j) for j in range(50)] for i in range(50)]
    assert mask.tolist() == expected


@given(patterns, st.integers(0, 60))
def test_restart_last_query_and_bound_agree_with_first_visible(pattern, position):
    starts = [q for q in range(position + 1) if pattern.first_visible(q) == q]
    assert pattern.restart(position) == max(starts)
    seeing = [q for q in range(position, 200) if pattern.first_visible(q) <= position]
    last = pattern.last_query(position)
    assert seeing[-1] == (199 if last is None else last)
    if pattern.bound is not None:
        most = max(p - pattern.first_visible(p) + 1 for p in range(200))
        assert most == pattern.bound


@given(patterns, st.integers(0, 40), st.integers(1, 700))
def test_query_blocks_cover_the_queries_and_causal_ones_need_no_mask(pattern, start, count):
    position = start
    for begin, end, causal in query_blocks(pattern, start, start + count):
        assert begin == position < end
        position = end
        if causal:
            assert pattern.first_visible(begin) == begin >= pattern.first_visible(end - 1)
    assert position == start + count


@pytest.mark.parametrize(
    "pattern", [FULL, window(1), window(2), window(5), window(9), window(10), chunk(1), chunk(4), chunk(9),
                window(3, anchors=2), chunk(4, anchors=2), chunk(3, anchors=4)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("past", range(10))
def test_changing_a_token_moves_a_row_exactly_when_it_is_visible(pattern, past):
    """One layer, 9 tokens, every split into past and new: the change reaches row i iff token j is visible."""
    model = tiny_model([pattern])
    past = min(past, 9)
    tokens = random_tokens(9)

    def rows(ids):
        cache = model.new_cache(step=4)
        parts = [model([ids[a:b]], cache=cache)[0] for a, b in ((0, past), (past, 9)) if a < b]
        return torch.cat(parts)

    before = rows(tokens)
    for j in range(9):
        changed = list(tokens)
        changed[j] = (changed[j] + 1) % 97
        moved = (rows(changed) - before).abs().amax(dim=1) > 1e-9
        assert moved.tolist() == [plainly_visible(pattern, i, j) for i in range(9)], (j, past)


@pytest.mark.parametrize("make", [lambda: window(0), lambda: window(-1), lambda: chunk(0),
                                  lambda: SlidingWindow(window=2.0), lambda: window(4, anchors=-1)])  # fmt: skip
def test_sizes_must_be_positive_integers(make):
    with pytest.raises(InputError, match="expected an integer"):
        make()
