from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exactkv.errors import InputError
from exactkv.generation.sampling import GREEDY, Sampling, gumbel, nucleus, sample


def test_greedy_takes_the_greatest_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-math.inf, 1.0, 2.0, 2.0]])
    assert sample(logits, GREEDY, 0).tolist() == [1, 0, 2]
    assert sample(logits[2], GREEDY, 0).shape == ()


def splitmix64(seed: int, position: int, token: int) -> float:
    """The noise by its definition, in Python's integers."""
    word, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        return z ^ (z >> 31)

    state = mix((mix((seed + golden) & word) + (position + 1) * golden) & word)
    uniform = ((mix((state + (token + 1) * golden) & word) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(uniform))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 300_000))
def test_noise_is_a_pure_function_of_seed_position_and_token(seed: int, position: int, token: int) -> None:
    expected = splitmix64(seed, position, token)
    alone = gumbel(seed, torch.tensor([position]), torch.tensor([token]))
    among = gumbel(seed, torch.tensor([7, position, 0]), torch.tensor([5, 3, token, 8]))
    assert alone.item() == pytest.approx(expected, rel=1e-14, abs=1e-14)
    assert among[1, 2].item() == alone.item()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("varied", ["position", "seed"])
def test_samples_follow_the_distribution(temperature: float, varied: str) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 0.5, -1.0, 1.5, -2.0, -math.inf])
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    count = 20_000 if varied == "position" else 1_000
    if varied == "position":
        drawn = sample(logits.expand(count, -1), Sampling(temperature, seed=3), range(count))
    else:
        drawn = torch.stack([sample(logits, Sampling(temperature, seed=s), 11) for s in range(count)])
    counted = torch.bincount(drawn, minlength=8)
    assert counted[7] == 0
    expected = probabilities[:7] * count
    chi_square = float(((counted[:7] - expected) ** 2 / expected).sum())
    assert chi_square < 22.5  # 6 degrees of freedom: exceeded once in a thousand


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


def plain_nucleus(probabilities: list[float], top_p: float) -> set[int]:
    kept: set[int] = set()
    total = 0.0
    for token in sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i)):
        kept.add(token)
        total += probabilities[token]
        if total >= top_p:
            break
    return kept


@given(st.data())
def test_top_p_keeps_the_smallest_set_that_reaches_it(data: st.DataObject) -> None:
    """Few distinct logits, so that ties are common."""
    levels = st.lists(st.integers(-6, 6).map(float) | st.just(-math.inf), min_size=1, max_size=40)
    rows = [data.draw(levels.filter(lambda row: max(row) > -math.inf))]
    rows.append(data.draw(st.permutations(rows[0])))
    top_p = data.draw(st.floats(0.01, 1.0) | st.sampled_from([0.25, 0.5, 0.75]))
    scaled = torch.tensor(rows, dtype=torch.float64)
    kept = nucleus(scaled, top_p)
    for row, mask in zip(torch.softmax(scaled, dim=1).tolist(), kept, strict=True):
        assert set(mask.nonzero().flatten().tolist()) == plain_nucleus(row, top_p)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999999])
def test_top_p_on_a_large_flat_vocabulary(top_p: float) -> None:
    """The set is far larger than the first look at the most probable tokens; every third logit is equal."""
    scaled = torch.randn(2, 6000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1
    scaled[:, ::3] = 0.05
    kept = nucleus(scaled, top_p)
    for row, mask in zip(torch.softmax(scaled, dim=1).tolist(), kept, strict=True):
        assert set(mask.nonzero().flatten().tolist()) == plain_nucleus(row, top_p)


def test_only_the_nucleus_is_sampled_in_its_own_proportions() -> None:
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()
    drawn = sample(logits.expand(20_000, -1), Sampling(1.0, top_p=0.65), range(20_000))
    counted = torch.bincount(drawn, minlength=4) / 20_000
    assert counted[1] == counted[3] == 0
    assert float(counted[0]) == pytest.approx(4 / 7, abs=0.015)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, seed=5), Sampling(1.3, 0.7, seed=6)])
def test_a_row_of_a_batch_is_that_row_alone(sampling: Sampling) -> None:
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(1)) * 3
    positions = [4, 1000, 0, 31, 4]
    together = sample(logits, sampling, positions)
    alone = [int(sample(row, sampling, p)) for row, p in zip(logits, positions, strict=True)]
    assert together.tolist() == alone
    assert sample(logits.flip(0), sampling, positions[::-1]).tolist() == alone[::-1]


def test_limits_come_to_the_greedy_choice() -> None:
    logits = torch.randn(300, 50, generator=torch.Generator().manual_seed(2))
    expected = sample(logits, GREEDY, 0).tolist()
    for sampling in (
        Sampling(1e-300),
        Sampling(5e-324),
        Sampling(1.0, top_p=1e-9),
        Sampling(1e-6, top_p=0.9),
    ):
        assert sample(logits, sampling, range(300)).tolist() == expected


def test_a_seed_is_a_sample() -> None:
    logits = torch.zeros(200, 1000)
    first, again, other = (sample(logits, Sampling(1.0, seed=s), range(200)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert int((first == other).sum()) < 5


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)])
@pytest.mark.parametrize(("value", "said"), [(math.nan, "NaN"), (math.inf, r"\+inf")])
def test_logits_that_are_no_numbers_are_refused(sampling: Sampling, value: float, said: str) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = value
    with pytest.raises(InputError, match=f"row 1 of the logits holds {said}"):
        sample(logits, sampling, 0)


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(InputError, match="row 0 of the logits holds nothing but -inf"):
        sample(torch.full((8,), -math.inf), GREEDY, 0)
    with pytest.raises(InputError, match=r"shape \[1, 2, 3\]"):
        sample(torch.zeros(1, 2, 3), GREEDY, 0)
    with pytest.raises(InputError, match="2 positions were given for 3 rows"):
        sample(torch.zeros(3, 8), Sampling(1.0), [1, 2])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 63}, "seed is"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"seed": True}, "seed is True"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Sampling(**settings)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, seed=5), Sampling(1.3, 0.7, seed=6)])
def test_a_gpu_draws_the_same(sampling: Sampling) -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(3)) * 3
    assert torch.equal(sample(logits.cuda(), sampling, range(64)).cpu(), sample(logits, sampling, range(64)))
