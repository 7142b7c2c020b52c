"""Weights in integers of a few bits, with a scale and a zero a row or a group of a row's numbers.

GPTQ's first format stores each zero less 1, and readers differ for a zero of 0. Today's writer (gptqmodel) subtracts
from packed words: a zero of 0 becomes all ones and borrows 1 of its neighbour. It reads by adding to whole words again,
which is exact whatever the zeros are; so is it read here. Others add 1 to each number: the later AutoGPTQ cuts that to
the bits (0, but the neighbour comes out 1 too low), the earlier one and vLLM do not (16, which no writer means: zeros
of 4 bits are at most 15). Where no zero is 0, as in all symmetric files, all agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exactkv.errors import LoadError
from exactkv.models.formats import floats
from exactkv.models.formats.recipe import (
    Block,
    Recipe,
    Shapes,
    block_of,
    ending,
    group_blocks,
    numbers_of,
    per_word,
    spread,
    stems,
    unpacked,
    whole,
    whole_number,
)

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the columns 0 … 7 lie in a word of AWQ's (AutoAWQ, "gemm" version)."""


PACKINGS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "dense")
"""Of compressed-tensors' formats, those that are read."""


def compressed(fields: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Recipe], set[str]]:
    """compressed-tensors: packed ("weight_packed", zeros packed along the rows), or an int8 or fp8 "weight". Scales
    are a number a tensor, a row ("channel"), a "group" of a row, or a "block"."""
    groups = fields.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise LoadError(f"quantization_config: config_groups is {groups!r:.80}, expected an object of objects")
    named = [fields, *groups.values(), fields.get("sparsity_config") or {}]
    given = {str(part["format"]) for part in named if isinstance(part, dict) and part.get("format") is not None}
    if unread := sorted(given - {*PACKINGS, "mixed-precision"}):  # that one: see the groups
        raise LoadError(
            f"the weights are quantized (compressed-tensors) in the format {', '.join(map(repr, unread))}, which is "
            f"not supported; supported are {', '.join(PACKINGS)}"
        )
    weights = [group["weights"] for group in groups.values() if group.get("weights")]
    if not all(isinstance(w, dict) for w in weights):
        raise LoadError(f"quantization_config: the weights of config_groups are {weights!r:.80}, expected objects")
    bits = {whole_number("num_bits", w.get("num_bits", 8)) for w in weights}
    if len(bits) > 1:
        raise LoadError(f"the weights are quantized (compressed-tensors) with {sorted(bits)} bits; expected one number")
    width = bits.pop() if bits else 8
    recipes = {}
    for stem in stems(shapes, ".weight_scale"):
        name, scale = f"{stem}.weight", f"{stem}.weight_scale"
        zero, order, words = f"{stem}.weight_zero_point", f"{stem}.weight_g_idx", f"{stem}.weight_packed"
        optional = [n for n in (zero, order) if n in shapes]
        if words in shapes:
            if len(shapes[words]) != 2:
                raise LoadError(f"{words} has the shape {list(shapes[words])}, expected [rows, words]")
            # The true number of columns is stored as "weight_shape"; it differs where the last word is not full.
            shape = (shapes[words][0], shapes[words][1] * per_word(width, "compressed-tensors"))
            block = block_of(scale, shape, shapes[scale], _blocks(weights, shape))
            compute = _packed(width, zero in shapes, order in shapes, block)
            recipes[name] = Recipe(shape, (words, scale, *optional), compute)
        elif name in shapes:
            block = block_of(scale, shapes[name], shapes[scale], _blocks(weights, shapes[name]))
            compute = _affine(block) if zero in shapes else floats.scaled(block)
            recipes[name] = Recipe(shapes[name], (name, scale, *((zero,) if zero in shapes else ())), compute)
    return recipes, ending(
        shapes, ".weight_shape", ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"
    )


def _blocks(weights: list[dict[str, Any]], shape: tuple[int, ...]) -> list[Block]:
    """The blocks that the strategies of the config's groups mean; none where it does not say."""
    rows, columns = whole(shape)
    found: list[Block] = []
    for given in weights:
        match given.get("strategy"):
            case None:
                found += group_blocks(given, columns)
            case "tensor":
                found.append((rows, columns))
            case "channel":
                found.append((1, columns))
            case "group":
                found.append((1, whole_number("group_size", given.get("group_size"))))
            case "block":
                found.append(floats.block_size("block_structure", given.get("block_structure")))
            case other:
                raise LoadError(
                    f"the weights are quantized (compressed-tensors) with the strategy {other!r}; supported are "
                    "tensor, channel, group and block"
                )
    return list(dict.fromkeys(found))


def _packed(bits: int, has_zero: bool, has_order: bool, block: Block) -> Any:
    half = 2 ** (bits - 1)

    def compute(out: Tensor, words: Tensor, scale: Tensor, *others: Tensor) -> None:
        scale = numbers_of(scale)
        numbers = unpacked(words, bits, 1) - half
        zero = unpacked(others[0], bits, 0)[: scale.shape[0]] - half if has_zero else torch.zeros_like(scale)
        if zero.shape != scale.shape:
            raise LoadError(f"zeros of shape {list(zero.shape)} for scales of {list(scale.shape)}")
        shape = tuple(numbers.shape)
        if has_order:
            group = indices(others[-1], scale.shape[1], shape[1])
            scale, zero = scale[:, group], zero[:, group].to(torch.float32)
        out.copy_((numbers - spread(zero, shape, block)) * spread(scale, shape, block))

    return compute


def _affine(block: Block) -> Any:
    def compute(out: Tensor, numbers: Tensor, scale: Tensor, zero: Tensor) -> None:
        if zero.numel() != scale.numel():
            raise LoadError(f"zeros of shape {list(zero.shape)} for scales of {list(scale.shape)}")
        shape = tuple(numbers.shape)
        out.copy_((numbers.to(torch.float32) - spread(zero, shape, block)) * spread(numbers_of(scale), shape, block))

    return compute


def indices(order: Tensor, groups: int, inputs: int) -> Tensor:
    """The group of each input ("g_idx"), checked."""
    if order.shape != (inputs,) or not 0 <= int(order.min()) <= int(order.max()) < groups:
        raise LoadError(
            f"g_idx has the shape {list(order.shape)} or a number outside 0 to {groups - 1}; expected one for each of "
            f"{inputs} inputs; the files are damaged"
        )
    return order.long()


def awq(fields: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Recipe], set[str]]:
    """AWQ (arXiv 2306.00978) as AutoAWQ packs it: [in, out / 8] words of 4 bits, in an order of their own."""
    version = str(fields.get("version") or "gemm").lower()
    bits = whole_number("bits", fields.get("bits", fields.get("w_bit", 4)))
    if version != "gemm" or bits != 4:
        raise LoadError(f"the weights are quantized (awq, {version}, {bits} bits); supported is gemm with 4 bits")
    recipes = {}
    for stem in stems(shapes, ".qweight"):
        inputs, words = matrix(f"{stem}.qweight", shapes)
        # Without zeros, numbers count from the middle; only where the config says so are they not missing.
        centred = fields.get("zero_point") is False and f"{stem}.qzeros" not in shapes
        parts = tuple(f"{stem}.{part}" for part in ("qweight", "scales", *(() if centred else ("qzeros",))))
        block = _group(fields, shapes, stem, inputs, words * 8)
        recipes[f"{stem}.weight"] = Recipe((words * 8, inputs), parts, _awq(block))
    return recipes, set()


def matrix(name: str, shapes: Shapes) -> tuple[int, int]:
    if len(shapes[name]) != 2:
        raise LoadError(f"{name} has the shape {list(shapes[name])}, expected two axes")
    return shapes[name][0], shapes[name][1]


def _group(fields: Mapping[str, Any], shapes: Shapes, stem: str, inputs: int, outputs: int) -> Block:
    """Of "scales" [groups, outputs]: how many inputs have one, and 1."""
    name = f"{stem}.scales"
    if name not in shapes:
        return 1, 1  # reading will say that it is missing
    allowed = [(size, 1) for _, size in group_blocks(fields, inputs)]
    return block_of(name, (inputs, outputs), shapes[name], allowed)


def _awq(block: Block) -> Any:
    order = torch.tensor(AWQ_ORDER)

    def ordered(words: Tensor) -> Tensor:
        numbers: Tensor = unpacked(words, 4, 1).unflatten(1, (-1, 8))[..., order]
        return numbers.flatten(1)

    def compute(out: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        numbers = ordered(weight)
        zero = torch.full_like(scales, 8) if zeros is None else ordered(zeros)
        if zero.shape != scales.shape:
            raise LoadError(f"zeros of shape {list(zero.shape)} for scales of {list(scales.shape)}")
        shape = tuple(numbers.shape)
        out.copy_(((numbers - spread(zero, shape, block)) * spread(numbers_of(scales), shape, block)).t())

    return compute


def gptq(fields: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Recipe], set[str]]:
    """GPTQ (arXiv 2210.17323) as AutoGPTQ packs it: [in / n, out] words; zeros less 1 (see above), but not in
    "gptq_v2"; each input's group in "g_idx"."""
    bits = whole_number("bits", fields.get("bits", 4))
    count = per_word(bits, "gptq")
    shift = 0 if "gptq_v2" in (fields.get("checkpoint_format"), fields.get("format")) else 1
    recipes = {}
    for stem in stems(shapes, ".qweight"):
        words, outputs = matrix(f"{stem}.qweight", shapes)
        parts = [f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")]
        parts += [f"{stem}.g_idx"] if f"{stem}.g_idx" in shapes else []
        size, _ = _group(fields, shapes, stem, words * count, outputs)
        recipes[f"{stem}.weight"] = Recipe((outputs, words * count), tuple(parts), _gptq(bits, shift, size))
    return recipes, set()


def _gptq(bits: int, shift: int, size: int) -> Any:
    ones = shift * sum(1 << place for place in range(0, 32, bits))  # in every number of a word

    def compute(out: Tensor, weight: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None = None) -> None:
        numbers = unpacked(weight, bits, 0)  # [in, out]
        zero, scale = unpacked(zeros + ones, bits, 1).to(torch.float32), numbers_of(scales)  # [groups, out]
        if zero.shape != scale.shape:
            raise LoadError(f"zeros of shape {list(zero.shape)} for scales of {list(scale.shape)}")
        order = torch.arange(len(numbers)) // size if order is None else order
        group = indices(order, len(scale), len(numbers))
        out.copy_(((numbers - zero[group]) * scale[group]).t())

    return compute
