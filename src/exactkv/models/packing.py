"""Which weights of a decoder are packed, and in what format."""

from __future__ import annotations

import re

from exactkv.errors import InputError
from exactkv.models.parameters import parameters
from exactkv.models.spec import DecoderSpec
from exactkv.ops.quantize import WeightFormat

_LAYERS = re.compile(
    r"layers\.\d+\.("
    r"attention\.(qkv|q|q_down|q_up|kv_down|out)"
    r"|(mlp|beside)\.((shared\.)?(gate_up|up|down)|experts\.(gate_up|down))"
    r"|recurrent\.(in|qkvz|x|y|out)"
    r"|per_layer\.(gate|out)"
    r")\.weight"
)
"""The matrices by which nearly all of a layer's bytes are read. Norms, biases, routers, convolutions, steps and decays
of recurrences and what mixes residual streams stay as they are: they are small, and errors in them weigh."""
_DEFAULT_GROUP = {4: 32, 8: 128}
_FORMAT = re.compile(r"int(4|8)(?::(\d{1,4}))?")


def weight_format(given: str) -> WeightFormat:
    """The format that ``given`` means: "int8" or "int4", with the numbers of a group after a colon ("int4:64") if they
    are not 128 and 32. Raises InputError."""
    match = _FORMAT.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise InputError(
            f'quantize is {given!r}; expected "int8", "int4", one with the size of groups such as "int4:64", or None'
        )
    bits = int(match[1])
    return WeightFormat(bits, int(match[2]) if match[2] else _DEFAULT_GROUP[bits])


def packing(spec: DecoderSpec, form: WeightFormat) -> dict[str, WeightFormat]:
    """The format of each parameter of ``spec`` that is packed. The head has 8 bits always: it decides between near
    tokens, and where the embedding is tied to it a token's row is the same. An embedding that only gives rows stays.
    Matrices whose inputs no group divides stay too."""
    head = "embedding.weight" if spec.tied_head else "head.weight"
    wide = WeightFormat(8, max(form.group, _DEFAULT_GROUP[8]))
    found = {}
    for name, parameter in parameters(spec).items():
        if name == head or _LAYERS.fullmatch(name):
            settled = (wide if name == head else form).for_inputs(parameter.shape[-1])
            if settled is not None:
                found[name] = settled
    return found
