"""`Sampling`: ranges, contradictions, and what comes from outside."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest

from exactkv.errors import InputError
from exactkv.generation.sampling import GREEDY, Sampling
from tests.generation.tiny_text import byte_tokenizer


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected a number >= 0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 0}, "top_p is 0; expected a number > 0 and <= 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"typical_p": 0}, "typical_p is 0"),
        ({"top_k": -1}, "top_k is -1; expected an integer >= 0; 0: all tokens"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"xtc_probability": 1.1}, "xtc_probability is 1.1"),
        ({"xtc_threshold": 0}, "xtc_threshold is 0"),
        ({"xtc_threshold": 0.6}, "xtc_threshold is 0.6; .*XTC needs two tokens that reach it"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; expected a number from 1e-6 to 1e6; 1 changes nothing"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"frequency_penalty": None}, "frequency_penalty is None"),
        ({"penalty_window": 0}, "penalty_window is 0; expected an integer >= 1, or None for all of the text"),
        ({"dry_multiplier": -1}, "dry_multiplier is -1"),
        ({"dry_base": 0.9}, "dry_base is 0.9"),
        ({"dry_allowed_length": 0}, "dry_allowed_length is 0"),
        ({"dry_range": -1}, "dry_range is -1"),
        ({"dry_sequence_breakers": "\n"}, "dry_sequence_breakers is a str; expected a list"),
        ({"dry_sequence_breakers": [""]}, "one of dry_sequence_breakers is ''; expected a text or a token id"),
        ({"dry_sequence_breakers": [1.5]}, "one of dry_sequence_breakers is 1.5"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 is inf; .*name it in banned_tokens"),
        ({"logit_bias": {-1: 1.0}}, "a token of logit_bias is -1"),
        ({"logit_bias": {"1": 1.0}}, "a token of logit_bias is '1'"),
        ({"logit_bias": [3]}, r"logit_bias holds 3; expected token ids with a number each, such as \{50: -1.5\}"),
        ({"logit_bias": [(1, 1), (1, 2)]}, "logit_bias names token 1 twice"),
        ({"logit_bias": 5}, "logit_bias is a int; expected a list"),
        ({"banned_tokens": [1.0]}, "a token of banned_tokens is 1.0"),
        ({"banned_tokens": 3}, "banned_tokens is a int; expected a list"),
        ({"allowed_tokens": [-3]}, "a token of allowed_tokens is -3"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 63}, "seed is"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"seed": True}, "seed is True"),
        # What contradicts itself.
        ({"allowed_tokens": []}, "allowed_tokens is empty, so nothing could be chosen"),
        ({"banned_tokens": [1, 2], "allowed_tokens": [2, 3]}, "token 2 is in banned_tokens and in allowed_tokens"),
        ({"banned_tokens": [1], "logit_bias": {1: 2.0}}, "logit_bias names token 1, which is in banned_tokens"),
        ({"allowed_tokens": [1], "logit_bias": {2: 2.0}}, "logit_bias names token 2, which is not in allowed_tokens"),
        ({"xtc_probability": 0.5}, "temperature is 0, .*xtc_probability is 0.5, .*give a temperature above 0"),
        ({"typical_p": 0.5}, "temperature is 0, .*typical_p is 0.5"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Sampling(**settings)


def test_names_and_values_from_outside() -> None:
    given = {"temperature": 1, "logit_bias": {"50": -1, "7": 2.5}, "banned_tokens": [3, 1, 3]}
    sampling = Sampling.from_dict(json.loads(json.dumps(given)))
    assert sampling.bias == ((7, 2.5), (50, -1.0)) and sampling.banned == (1, 3)
    assert given["banned_tokens"] == [3, 1, 3]
    with pytest.raises(InputError, match="'temprature' is no setting of sampling; did you mean temperature"):
        Sampling.from_dict({"temprature": 1})
    with pytest.raises(InputError, match=r"'n' is no setting of sampling.*There are: temperature, top_p"):
        Sampling.from_dict({"n": 1})
    with pytest.raises(InputError, match="a token of logit_bias is '1.5'"):
        Sampling.from_dict({"logit_bias": {"1.5": 1}})


def test_they_are_a_value() -> None:
    """Immutable also within, equal by content, and the same after JSON, as saved conversations have it."""
    bias, banned = {5: 1.0, 2: -1.0}, [4, 3]
    sampling = Sampling(0.5, logit_bias=bias, banned_tokens=banned, dry_multiplier=0.5, dry_sequence_breakers=["x", 3])
    bias[9] = 1.0
    banned.append(9)
    assert sampling.bias == ((2, -1.0), (5, 1.0)) and sampling.banned == (3, 4)
    assert hash(sampling) == hash(replace(sampling)) and sampling == replace(sampling) != replace(sampling, seed=1)
    assert Sampling(**json.loads(json.dumps(asdict(sampling)))) == sampling
    with pytest.raises(FrozenInstanceError):
        sampling.seed = 3  # type: ignore[misc]


def test_what_they_need() -> None:
    assert not (GREEDY.edits or GREEDY.filters or GREEDY.reads_text)
    assert Sampling(presence_penalty=-0.1).reads_text and Sampling(repetition_penalty=0.9).edits
    assert Sampling(dry_multiplier=0.1).reads_text and not Sampling(dry_base=3).reads_text
    assert Sampling(allowed_tokens=[1]).edits and not Sampling(allowed_tokens=[1]).reads_text
    assert Sampling(1.0, xtc_probability=0.1).filters and not Sampling(1.0, xtc_threshold=0.2).filters
    assert Sampling(logit_bias={3: 1}, banned_tokens=[7]).greatest_id == 7 and GREEDY.greatest_id == -1


def test_breakers_become_tokens() -> None:
    tokenizer = byte_tokenizer()
    sampling = Sampling(dry_multiplier=1.0, dry_sequence_breakers=["\n", "é", 7, "\n"])
    newline, last = tokenizer.encode("\n", False)[0], tokenizer.encode("é", False)[-1]
    assert sampling.resolved(tokenizer).breakers == (newline, last, 7)
    with pytest.raises(InputError, match="this model has no tokenizer; give token ids"):
        sampling.resolved(None)
    assert GREEDY.resolved(None) is GREEDY  # no DRY, no breakers
    assert Sampling(dry_multiplier=1.0, dry_sequence_breakers=[3]).resolved(None).breakers == (3,)
