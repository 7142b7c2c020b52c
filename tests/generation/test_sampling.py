"""The choice of tokens: randomness, distributions, rows of a batch, several positions at once, log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exactkv.errors import InputError
from exactkv.generation.sampling import GREEDY, History, Sampling, choose, choose_run
from exactkv.generation.sampling.noise import coin, gumbel


def drawn(logits: Tensor, sampling: Sampling, positions: Any) -> list[int]:
    """One sampling for all rows, and one row for all positions where there is but one."""
    positions = list(positions)
    rows = logits.expand(len(positions), -1)
    return choose(rows, [sampling] * len(positions), positions).ids()


def test_greedy_takes_the_greatest_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-math.inf, 1.0, 2.0, 2.0]])
    assert drawn(logits, GREEDY, [0, 0, 0]) == [1, 0, 2]
    edits = Sampling(logit_bias={0: 3.0}, banned_tokens=[1])
    assert drawn(logits, edits, [0, 0, 0]) == [0, 0, 2]
    assert choose(torch.zeros(0, 4), [], []).ids() == []
    assert choose_run(torch.zeros(0, 4), Sampling(presence_penalty=1.0), 0, History([1])).ids() == []


def splitmix64(seed: int, position: int, token: int) -> float:
    """The uniform number by its definition, in Python's integers."""
    word, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        return z ^ (z >> 31)

    state = mix((mix((seed + golden) & word) + (position + 1) * golden) & word)
    return ((mix((state + (token + 1) * golden) & word) >> 12) + 0.5) * 2.0**-52


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 300_000))
def test_noise_is_a_pure_function_of_seed_position_and_token(seed: int, position: int, token: int) -> None:
    expected = -math.log(-math.log(splitmix64(seed, position, token)))
    alone = gumbel(seed, torch.tensor([position]), torch.tensor([token]))
    among = gumbel(torch.tensor([3, seed, 5]), torch.tensor([7, position, 0]), torch.tensor([5, 3, token, 8]))
    assert alone.item() == pytest.approx(expected, rel=1e-14, abs=1e-14)
    assert among[1, 2].item() == alone.item()
    assert coin(seed, position) == splitmix64(seed, position, -1)


def chi_square(tokens: list[int], probabilities: Tensor) -> float:
    """None of what cannot come has come; the statistic of the rest."""
    counted = torch.bincount(torch.tensor(tokens), minlength=len(probabilities))
    assert int(counted[probabilities == 0].sum()) == 0
    expected = probabilities[probabilities > 0] * len(tokens)
    return float(((counted[probabilities > 0] - expected) ** 2 / expected).sum())


LOGITS = torch.tensor([2.0, 1.0, 0.0, 0.5, -1.0, 1.5, -2.0, -math.inf])
P = torch.softmax(LOGITS.double(), dim=0)


def only(*tokens: int, of: Tensor = P) -> Tensor:
    """The probabilities with just these tokens left."""
    kept = torch.zeros_like(of)
    kept[list(tokens)] = of[list(tokens)]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(0.5, seed=3), torch.softmax(LOGITS.double() / 0.5, dim=0)),
        (Sampling(1.0, seed=3), P),
        (Sampling(2.0, seed=4), torch.softmax(LOGITS.double() / 2, dim=0)),
        (Sampling(1.0, top_k=3), only(0, 1, 5)),
        (Sampling(1.0, top_p=0.65), only(0, 5)),
        (Sampling(1.0, min_p=0.2), only(0, 1, 3, 5)),
        (Sampling(1.0, typical_p=0.4), only(1, 5)),  # the most probable one is too probable
        (Sampling(1.0, xtc_probability=1, xtc_threshold=0.15), only(1, 2, 3, 4, 6)),
        (Sampling(1.0, xtc_probability=0.25, xtc_threshold=0.15), 0.75 * P + 0.25 * only(1, 2, 3, 4, 6)),
        (Sampling(1.0, xtc_probability=0.4, top_k=3, seed=9), 0.6 * only(0, 1, 5) + 0.4 * only(1)),
        (Sampling(1.0, logit_bias={0: -2.0, 6: 2.0}), torch.softmax(torch.tensor([0, 1, 0, 0.5, -1, 1.5, 0, -99]), 0)),
        (Sampling(1.0, banned_tokens=[0, 5], top_k=2), only(1, 3)),
        (Sampling(1.0, allowed_tokens=[6, 2, 7]), only(2, 6)),
    ],
)  # fmt: skip
def test_samples_follow_the_processed_distribution(sampling: Sampling, expected: Tensor) -> None:
    expected = torch.where(expected > 1e-9, expected, 0.0).double()
    tokens = drawn(LOGITS[None], sampling, range(1_500))
    assert chi_square(tokens, expected) < 24.3  # 7 degrees of freedom: exceeded once in a thousand


def test_over_seeds_too() -> None:
    rows = LOGITS.expand(1_500, -1)
    tokens = choose(rows, [Sampling(1.0, seed=s) for s in range(1_500)], [11] * 1_500).ids()
    assert chi_square(tokens, P) < 24.3


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    first = gumbel(0, torch.arange(400), torch.arange(100))
    others = (
        gumbel(0, torch.arange(1, 401), torch.arange(100)),
        gumbel(1, torch.arange(400), torch.arange(100)),
        gumbel(0, torch.arange(400), torch.arange(1, 101)),
    )
    for other in others:
        correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.025  # five standard deviations of 40,000 pairs
    assert float(first.mean()) == pytest.approx(0.5772, abs=0.03)
    assert float(first.var()) == pytest.approx(math.pi**2 / 6, abs=0.1)
    coins = torch.tensor([coin(0, p) for p in range(2000)])
    noise = gumbel(0, torch.arange(2000), torch.arange(1))[:, 0]
    assert abs(float(torch.corrcoef(torch.stack([coins, noise]))[0, 1])) < 0.1
    assert float(coins.mean()) == pytest.approx(0.5, abs=0.03)


VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    """Any settings, often several at once."""

    def some(strategy: st.SearchStrategy[Any], otherwise: Any) -> Any:
        return draw(st.just(otherwise) | strategy)

    warm = draw(st.booleans())
    allowed = some(st.sets(TOKENS, min_size=3), None)
    banned = some(st.sets(TOKENS, max_size=5), ()) if allowed is None else ()
    named = TOKENS.filter(lambda t: t not in banned and (allowed is None or t in allowed))
    return Sampling(
        temperature=draw(st.sampled_from([0.3, 1.0, 1.7])) if warm else 0.0,
        top_p=some(st.sampled_from([0.3, 0.8]), 1.0),
        seed=draw(st.integers(0, 50)),
        top_k=some(st.integers(1, 50), 0),
        min_p=some(st.sampled_from([0.05, 0.5]), 0.0),
        typical_p=some(st.sampled_from([0.4, 0.9]), 1.0) if warm else 1.0,
        xtc_probability=some(st.sampled_from([0.5, 1.0]), 0.0) if warm else 0.0,
        repetition_penalty=some(st.sampled_from([0.8, 1.3]), 1.0),
        presence_penalty=some(st.sampled_from([-0.5, 0.7]), 0.0),
        frequency_penalty=some(st.sampled_from([-0.1, 0.2]), 0.0),
        penalty_window=some(st.integers(1, 8), None),
        dry_multiplier=some(st.just(0.8), 0.0),
        dry_allowed_length=draw(st.integers(1, 3)),
        dry_sequence_breakers=draw(st.sets(TOKENS, max_size=3)),
        dry_range=some(st.integers(1, 12), None),
        logit_bias=some(st.dictionaries(named, st.floats(-3, 3), max_size=3), ()),
        banned_tokens=banned,
        allowed_tokens=allowed,
    )


TEXTS = st.lists(st.integers(0, 5), max_size=20)
ROW = st.tuples(samplings(), st.integers(0, 1000), TEXTS, st.none() | st.integers(0, 4), st.integers(0, 30))


def logits_of(seeds: list[int]) -> Tensor:
    """Rows with equal logits among others."""
    rows = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(s)) * 2 for s in seeds]
    return torch.stack([torch.where(r.abs() < 0.5, 0.0, r) for r in rows])


@settings(max_examples=40)
@given(st.lists(ROW, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_row_of_a_batch_is_that_row_alone(rows: list[Any], random: Any) -> None:
    """At any size and place, with other rows of any settings (faults J, K and S). The texts stay as they are."""
    logits = logits_of([seed for *_, seed in rows])
    alone = [
        choose(logits[i : i + 1], [s], [p], [History(text)], [count]) for i, (s, p, text, count, _) in enumerate(rows)
    ]
    order = [random.randrange(len(rows)) for _ in range(7)]
    histories = [History(text) for _, _, text, _, _ in rows]
    together = choose(
        logits[order], *([column[i] for i in order] for column in (
            [r[0] for r in rows], [r[1] for r in rows], histories, [r[3] for r in rows],
        ))
    )  # fmt: skip
    assert together.ids() == [alone[i].ids()[0] for i in order]
    assert list(together.logprobs) == [alone[i].logprobs[0] for i in order]  # to the last bit
    assert [list(h.tokens) for h in histories] == [text for _, _, text, _, _ in rows]


@settings(max_examples=30)
@given(samplings(), TEXTS, st.integers(0, 50), st.lists(st.integers(0, 5), max_size=5), st.none() | st.just(2))
def test_several_positions_at_once_are_one_at_a_time(
    sampling: Sampling, text: list[int], position: int, draft: list[int], count: int | None
) -> None:
    """Speculation's question (fault I): also asked again in the same history, after a part of the draft was taken."""
    logits, history = logits_of(list(range(len(draft) + 1))), History(text)
    for length in (len(draft), len(draft) // 2, len(draft)):
        at_once = choose_run(logits[: length + 1], sampling, position, history, draft[:length], count)
        expected = [
            choose(logits[t : t + 1], [sampling], [position + t], [History(text + draft[:t])], [count])
            for t in range(length + 1)
        ]
        assert at_once.ids() == [one.ids()[0] for one in expected]
        assert list(at_once.logprobs) == [one.logprobs[0] for one in expected]
        assert list(history.tokens) == text


@settings(max_examples=40)
@given(samplings(), TEXTS, st.integers(0, 30))
def test_log_probabilities(sampling: Sampling, text: list[int], seed: int) -> None:
    logits = logits_of([seed])
    told = choose(logits, [sampling], [5], [History(text)], [6]).logprobs[0]
    assert told is not None
    assert [told.token] == choose(logits, [sampling], [5], [History(text)]).ids()  # being told changes nothing
    own = torch.log_softmax(logits[0].double(), dim=0)
    assert told.logprob == pytest.approx(float(own[told.token]), abs=1e-12)
    best = sorted(range(VOCAB), key=lambda t: (-float(own[t]), t))[:6]
    assert [t for t, _ in told.top_logprobs] == best
    assert [p for _, p in told.top_logprobs] == pytest.approx([float(own[t]) for t in best], abs=1e-12)
    everything = choose(logits, [sampling], [5], [History(text)], [VOCAB]).logprobs[0]
    assert everything is not None
    after = dict(everything.sampled_top_logprobs)
    assert told.sampled_top_logprobs == everything.sampled_top_logprobs[:6]
    assert after[told.token] == told.sampled_logprob
    assert math.fsum(map(math.exp, after.values())) == pytest.approx(1, abs=1e-12)
    if sampling.temperature == 0:
        assert after == {told.token: 0.0}


def test_a_seed_is_a_sample() -> None:
    first, again, other = (drawn(torch.zeros(1, 1000), Sampling(1.0, seed=s), range(200)) for s in (1, 1, 2))
    assert first == again
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 5


def test_limits_come_to_the_greedy_choice() -> None:
    logits = torch.randn(300, 50, generator=torch.Generator().manual_seed(2))
    expected = drawn(logits, GREEDY, range(300))
    for settings_ in ({"temperature": 1e-300}, {"temperature": 5e-324}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        assert drawn(logits, Sampling(**{"temperature": 1.0, **settings_}), range(300)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(1.0), Sampling(1.0, top_p=0.5), Sampling(banned_tokens=[5]), Sampling(1.0, min_p=0.1)]
)
@pytest.mark.parametrize(("value", "said"), [(math.nan, "NaN"), (math.inf, r"\+inf")])
@pytest.mark.parametrize("count", [None, 2])
def test_logits_that_are_no_numbers_are_refused(sampling: Sampling, value: float, said: str, count: int | None) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = value
    choice = choose(logits, [sampling] * 3, [0] * 3, logprobs=[count] * 3)
    assert choice.tokens.tolist()[1] == -1 and min(choice.tokens.tolist()[::2]) >= 0
    with pytest.raises(InputError, match=f"row 1 of the logits holds {said}"):
        choice.ids()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("more", [{}, {"allowed_tokens": [2, 3]}, {"top_k": 2}])
def test_nothing_to_choose_from_is_refused(temperature: float, more: dict[str, Any]) -> None:
    logits = torch.full((1, 8), -math.inf)
    if "allowed_tokens" in more:
        logits[0, 5] = 1.0
    with pytest.raises(InputError, match="row 0 of the logits holds nothing but -inf"):
        choose(logits, [Sampling(temperature, **more)], [0]).ids()


def test_arguments_are_checked() -> None:
    with pytest.raises(InputError, match=r"shape \[1, 2, 3\]"):
        choose(torch.zeros(1, 2, 3), [GREEDY], [0])
    with pytest.raises(InputError, match="2 positions were given for 3 rows"):
        choose(torch.zeros(3, 8), [Sampling(1.0)] * 3, [1, 2])
    with pytest.raises(InputError, match="1 samplings were given for 3 rows"):
        choose(torch.zeros(3, 8), [GREEDY], [1, 2, 3])
    with pytest.raises(InputError, match="look at the text, which was not given"):
        choose(torch.zeros(1, 8), [Sampling(presence_penalty=1.0)], [0])
    with pytest.raises(InputError, match="sampling names token 8; the vocabulary is 0 to 7"):
        choose(torch.zeros(1, 8), [Sampling(banned_tokens=[8])], [0])
    with pytest.raises(InputError, match="token id 9 of the text is outside the vocabulary: 0 to 7"):
        choose(torch.zeros(1, 8), [Sampling(presence_penalty=1.0)], [0], [History([9])])
    with pytest.raises(InputError, match=r"expected token ids by now: sampling.resolved\(tokenizer\)"):
        choose(torch.zeros(1, 8), [Sampling(dry_multiplier=1.0)], [0], [History([1])])
    with pytest.raises(InputError, match="logprobs is -1"):
        choose(torch.zeros(1, 8), [GREEDY], [0], logprobs=[-1])
    with pytest.raises(InputError, match="the draft has 2 tokens for 2 rows"):
        choose_run(torch.zeros(2, 8), GREEDY, 0, None, [1, 2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(0.8, seed=5), Sampling(1.3, 0.7, seed=6), Sampling(1.0, top_k=9)]
)
def test_a_gpu_draws_the_same(sampling: Sampling) -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(3)) * 3
    assert drawn(logits.cuda(), sampling, range(64)) == drawn(logits, sampling, range(64))
