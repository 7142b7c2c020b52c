"""Random weights for a spec: for tests and benchmarks that need an architecture and no text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exactkv.models.parameters import parameters
from exactkv.models.spec import DecoderSpec


def random_weights(
    spec: DecoderSpec,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gain: float = 1.0,
) -> dict[str, Tensor]:
    """Every parameter of ``spec``, drawn so that activations keep their size: matrices normal with standard
    deviation gain / sqrt(inputs), norms near 1, biases small, learned
    logits of the size of scores. The same seed gives the same weights on a device."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(shape: tuple[int, ...], deviation: float, mean: float = 0.0) -> Tensor:
        drawn = torch.empty(shape, dtype=dtype, device=device)
        return drawn.normal_(mean, deviation, generator=generator)

    weights = {}
    for name, parameter in parameters(spec).items():
        if ".recurrent." in name and not name.endswith(("recurrent.norm.weight", "recurrent.norm.bias")):
            weights[name] = _recurrent(name, parameter.shape, normal)
        elif name.endswith("scale"):
            weights[name] = normal(parameter.shape, 0.1, 1.0)
        elif name.endswith("norm.weight"):
            weights[name] = normal(parameter.shape, 0.1, 1.0 - spec.norm_offset)
        elif name.endswith(".bias"):
            weights[name] = normal(parameter.shape, 0.1)
        elif name.endswith(("sinks", "score_bias")):
            weights[name] = normal(parameter.shape, 0.5)
        elif name.endswith(("embedding.weight", "positions.weight")):
            weights[name] = normal(parameter.shape, gain)
        else:
            weights[name] = normal(parameter.shape, gain * parameter.shape[-1] ** -0.5)
    return weights


def _recurrent(name: str, shape: tuple[int, ...], normal: Callable[..., Tensor]) -> Tensor:
    """A tensor of a recurrent mixer: decays as Mamba begins with (A = -1 … -n, Δ about 0.1) and the RG-LRU (a about
    0.9 to 0.99), so that states neither vanish nor grow, norms near 1."""
    last = name.rpartition(".recurrent.")[2]
    if last == "A_log":
        drawn = normal(shape, 0.05)
        return drawn.add_(torch.arange(1, shape[-1] + 1, device=drawn.device).log())
    means = {"dt_bias": -2.0, "D": 1.0, "rate": -4.0}
    if last in means or last.endswith("norm.weight"):
        return normal(shape, 0.3 if last in ("dt_bias", "rate") else 0.1, means.get(last, 1.0))
    if last.endswith(".bias"):
        return normal(shape, 0.1)
    return normal(shape, shape[-1] ** -0.5)
