"""Random weights for a spec: for tests and benchmarks that need an architecture and no text."""

from __future__ import annotations

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
    deviation gain / sqrt(inputs), norms near 1, biases small, learned logits of the size of scores. The same seed gives the same weights on a device."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(shape: tuple[int, ...], deviation: float, mean: float = 0.0) -> Tensor:
        drawn = torch.empty(shape, dtype=dtype, device=device)
        return drawn.normal_(mean, deviation, generator=generator)

    weights = {}
    for name, parameter in parameters(spec).items():
        if name.endswith("norm.weight"):
            weights[name] = normal(parameter.shape, 0.1, 1.0 - spec.norm_offset)
        elif name.endswith(".bias"):
            weights[name] = normal(parameter.shape, 0.1)
        elif name.endswith(("sinks", "score_bias")):
            weights[name] = normal(parameter.shape, 0.5)
        elif name in ("embedding.weight", "positions.weight"):
            weights[name] = normal(parameter.shape, gain)
        else:
            weights[name] = normal(parameter.shape, gain * parameter.shape[-1] ** -0.5)
    return weights
