"""Every tensor that a recurrent mixer needs: its shape by name."""

from __future__ import annotations

from exactkv.models.recurrent.spec import GatedDeltaSpec, Mamba2Spec, MambaSpec, RecurrentSpec, RgLruSpec, ShortConvSpec

Shape = tuple[int, ...]


def shapes(s: RecurrentSpec, hidden: int) -> dict[str, Shape]:
    """By name within the layer. Matrices are [out, in], convolutions [C, 1, K] as files have them."""
    match s:
        case MambaSpec():
            return _mamba(s, hidden)
        case Mamba2Spec():
            return _mamba2(s, hidden)
        case ShortConvSpec():
            return {
                **_linear("in", 3 * s.size, hidden, s.bias),
                **_conv(s.size, s.conv_width, s.bias),
                **_linear("out", hidden, s.size, s.bias),
            }
        case GatedDeltaSpec():
            return {
                **_linear("qkvz", sum(s.sections) + s.sections[2], hidden),
                **_linear("ba", 2 * s.num_value_heads, hidden),
                **_conv(sum(s.sections), s.conv_width, False),
                "dt_bias": (s.num_value_heads,),
                "A_log": (s.num_value_heads,),
                "gated_norm.weight": (s.value_dim,),
                **_linear("out", hidden, s.sections[2]),
            }
        case RgLruSpec():
            block = s.size // s.num_blocks
            gates = {f"{n}_gate.weight": (s.num_blocks, block, block) for n in ("input", "recurrence")}
            return {
                **_linear("x", s.size, hidden, True),
                **_linear("y", s.size, hidden, True),
                **_conv(s.size, s.conv_width, True),
                **gates,
                **{f"{n}_gate.bias": (s.num_blocks, block) for n in ("input", "recurrence")},
                "rate": (s.size,),
                **_linear("out", hidden, s.size, True),
            }


def _mamba(s: MambaSpec, hidden: int) -> dict[str, Shape]:
    found = {
        **_linear("in", 2 * s.inner_size, hidden, s.bias),
        **_conv(s.inner_size, s.conv_width, s.conv_bias),
        **_linear("select", s.dt_rank + 2 * s.state_size, s.inner_size),
        "dt.weight": (s.inner_size, s.dt_rank),
        "dt_bias": (s.inner_size,),
        "A_log": (s.inner_size, s.state_size),
        "D": (s.inner_size,),
        **_linear("out", hidden, s.inner_size, s.bias),
    }
    if s.inner_norm_eps is not None:
        found["dt_norm.weight"] = (s.dt_rank,)
        found |= {f"{name}_norm.weight": (s.state_size,) for name in ("B", "C")}
    return found


def _mamba2(s: Mamba2Spec, hidden: int) -> dict[str, Shape]:
    found = {
        **_linear("in", sum(s.sections), hidden, s.bias),
        **_conv(sum(s.sections[1:4]), s.conv_width, s.conv_bias),
        "dt_bias": (s.num_heads,),
        "A_log": (s.num_heads,),
        "D": (s.num_heads,),
        **_linear("out", hidden, s.inner_size, s.output_bias),
    }
    if s.gated_norm is not None:
        found["gated_norm.weight"] = (s.inner_size,)
    return found


def _linear(name: str, rows: int, inputs: int, bias: bool = False) -> dict[str, Shape]:
    found: dict[str, Shape] = {f"{name}.weight": (rows, inputs)}
    return {**found, f"{name}.bias": (rows,)} if bias else found


def _conv(channels: int, width: int, bias: bool) -> dict[str, Shape]:
    found: dict[str, Shape] = {"conv.weight": (channels, 1, width)}
    return {**found, "conv.bias": (channels,)} if bias else found
