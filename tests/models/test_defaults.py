"""Fields that a config does not have mean what transformers makes of their absence: one field after another is taken
out of a full config, and our spec is compared with that of the config which transformers fills up again."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from exactkv.errors import LoadError
from exactkv.models.load import read_spec, text_config
from exactkv.models.spec import DecoderSpec

from .cases import CASES
from .cases_dense import DENSE
from .cases_mixtures import MIXTURES
from .oracle import Case, config_of, transformers
from .test_recurrent_oracle import CASES as RECURRENT

NAMES = frozenset({"architectures", "model_type", "transformers_version"})
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "phi3",
        "original_max_position_embeddings",
    ): "rope's own field says it; transformers puts its default there instead"
}
"""By model type and field: why we differ."""


def meaning(fields: dict[str, Any]) -> DecoderSpec:
    return read_spec(*text_config(fields))


def by_model_type() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in (*CASES, *DENSE, *MIXTURES, *RECURRENT):
        found.setdefault(config_of(case).get_text_config().model_type, []).append(case)
    return found


KINDS = by_model_type()


@pytest.mark.parametrize("model_type", KINDS)
def test_an_absent_field_means_what_it_does_to_transformers(model_type: str) -> None:
    wrong, compared = [], 0
    for case in KINDS[model_type]:
        full = json.loads(json.dumps(config_of(case).get_text_config().to_dict()))
        for field in sorted(full.keys() - NAMES):
            rest = {name: value for name, value in full.items() if name != field}
            try:
                refilled = transformers.AutoConfig.for_model(**copy.deepcopy(rest)).to_dict()
            except Exception:  # transformers cannot do without
                continue
            try:
                ours = meaning(rest)
            except LoadError:  # nor can we, and say so
                continue
            compared += 1
            if ours != meaning(json.loads(json.dumps(refilled))) and (model_type, field) not in EXCEPTIONS:
                wrong.append(f"{field} (case {case.name})")
    assert compared > 10 and not wrong


@pytest.mark.parametrize("kind", ["gemma3", "gemma3n", "gemma4"])
def test_a_text_model_within_a_larger_one_has_the_same_defaults(kind: str) -> None:
    """Even where its config does not say what it is."""
    said = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 20}
    said |= {"num_attention_heads": 4, "num_kv_shared_layers": 0} if kind != "gemma3" else {"num_attention_heads": 4}
    alone = meaning({"model_type": f"{kind}_text", **said})
    assert meaning({"model_type": kind, "text_config": said}) == alone
    assert alone.layers[0].attention.head_dim == 256
