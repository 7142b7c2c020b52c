"""What converters change in tensors, undone: shapes, the rows of q and k, norm weights, decay rates, tensors that are
stored as two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exactkv.models.gguf.architectures import Architecture
from exactkv.models.gguf.file import TensorInfo

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the model. ``parts``: what it is made of; ``shape``: as the model has it. ``heads``: rows of so many
    heads are interleaved. ``change``: makes the model's values of the stored ones, where they differ."""

    parts: tuple[TensorInfo, ...]
    shape: Shape
    heads: int | None = None
    change: Callable[[Sequence[Tensor]], Tensor] | None = None


def layout(tensors: Mapping[str, TensorInfo], arch: Architecture, config: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of the model, by name, without those of layers that predict further tokens."""
    count = config.get("num_hidden_layers", config.get("n_layer", 0))
    further = {_block(name) for name in tensors if ".nextn." in name and int(_block(name)) >= count}
    own = {name: info for name, info in tensors.items() if _block(name) not in further}
    found = {name: _stored(info, arch, config) for name, info in own.items()}
    for name in own:
        prefix, _, ending = name.rpartition(".attn_")
        if ending == "k_b.weight" and f"{prefix}.attn_v_b.weight" in own:
            _join(found, f"{prefix}.attn_kv_b.weight", [name, f"{prefix}.attn_v_b.weight"], _keys_and_values)
        elif ending == "gate.weight" and f"{prefix}.attn_qkv.weight" in own:
            change, shape = _by_key_head(config)
            _join(found, f"{prefix}.ssm_in.weight", [f"{prefix}.attn_qkv.weight", name], change, shape)
    return found


def _block(name: str) -> str:
    """The number of a tensor's layer; "" for those of the whole model."""
    return name.split(".", 2)[1] if name.startswith("blk.") else ""


def _stored(info: TensorInfo, arch: Architecture, config: Mapping[str, Any]) -> Stored:
    part = info.name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
    reshaped = None if info.name.endswith(".bias") else _SHAPES.get(part)
    shape = info.shape if reshaped is None else reshaped(info.shape)
    if arch.permuted and part in ("attn_q", "attn_k"):
        return Stored((info,), shape, config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])
    if part == "ssm_a":
        return Stored((info,), shape, change=lambda parts: (-parts[0]).log())
    if arch.norm_offset and part.endswith("norm") and part != "ssm_norm" and not info.name.endswith(".bias"):
        return Stored((info,), shape, change=lambda parts: parts[0] - arch.norm_offset)
    return Stored((info,), shape)


def _convolution(shape: Shape) -> Shape:
    return (shape[0], 1, shape[1]) if len(shape) == 2 else shape


def _without_column(shape: Shape) -> Shape:
    return shape[:1] if len(shape) == 2 and shape[1] == 1 else shape


def _flat(shape: Shape) -> Shape:
    return (shape[0] * shape[1],) if len(shape) == 2 else shape


def _matrix(shape: Shape) -> Shape:
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape


# Part of a layer -> its shape as the model has it.
_SHAPES: dict[str, Callable[[Shape], Shape]] = {
    "ssm_conv1d": _convolution,
    "conv": _convolution,
    "ssm_a": _without_column,
    "ssm_d": _without_column,
    "ssm_norm": _flat,
    "ffn_gate_inp_shexp": lambda shape: (1, *shape) if len(shape) == 1 else shape,
    "altup_proj": _matrix,
    "altup_unembd_proj": _matrix,
}


def _join(
    found: dict[str, Stored],
    name: str,
    names: Sequence[str],
    change: Callable[[Sequence[Tensor]], Tensor],
    shape: Callable[[Sequence[Shape]], Shape] | None = None,
) -> None:
    """List two stored tensors as the one that they are parts of."""
    parts = tuple(found.pop(n).parts[0] for n in names)
    shapes = [info.shape for info in parts]
    whole = shape(shapes) if shape else _rows_of_heads(shapes)
    found[name] = Stored(parts, whole, change=change)


def _rows_of_heads(shapes: Sequence[Shape]) -> Shape:
    keys, values = shapes
    return (keys[0] * (keys[-1] + values[1]), values[-1])


def _keys_and_values(parts: Sequence[Tensor]) -> Tensor:
    """[H, rank, nope] and [H, v, rank]: latents to a head's keys, transposed, and to its values, which follow them."""
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def _by_key_head(config: Mapping[str, Any]) -> tuple[Callable[[Sequence[Tensor]], Tensor], Callable[..., Shape]]:
    """Queries, keys and values of all heads, and gates: the model has them key head by key head."""
    heads = config["linear_num_key_heads"]
    keys = config["linear_key_head_dim"] * heads
    values = config["linear_value_head_dim"] * config["linear_num_value_heads"]

    def change(parts: Sequence[Tensor]) -> Tensor:
        sections = (*parts[0].split([keys, keys, values]), parts[1])
        return torch.cat([section.unflatten(0, (heads, -1)) for section in sections], dim=1).flatten(0, 1)

    return change, lambda shapes: (shapes[0][0] + shapes[1][0], shapes[0][1])
