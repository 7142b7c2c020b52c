"""What is common to all layers of one call of the decoder, made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from exactkv.cache import AttentionLayer, KVView, RecurrentLayer, Step
from exactkv.models.rope import Rotation
from exactkv.models.spec import RopeSpec


@dataclass(frozen=True)
class Call:
    """``positions`` [B, T]: of the rows of the layers' input. ``rotations``: of each rope variant, there.
    ``layers``: the cache's, one for each layer that has rows of its own. ``recurrent``: the cache's, one for each
    layer that has a state. ``views``: what each of ``layers`` has shown, by the decoder layer's number, for layers
    that share it. ``per_layer`` [B, T, layers, size]: the layers' own inputs, if they have any."""

    step: Step
    positions: Tensor
    rotations: Mapping[RopeSpec, Rotation]
    layers: tuple[AttentionLayer, ...]
    recurrent: tuple[RecurrentLayer, ...] = ()
    per_layer: Tensor | None = None
    views: dict[int, KVView] = field(default_factory=dict)

    def last(self) -> Call:
        """The same for each row's last valid position alone."""
        rotations = {
            rope: Rotation(*(last_of_rows(t, self.step) for t in turned)) for rope, turned in self.rotations.items()
        }
        views = {i: view.last() for i, view in self.views.items()}
        positions = last_of_rows(self.positions, self.step)
        own = None if self.per_layer is None else last_of_rows(self.per_layer, self.step)
        return replace(self, positions=positions, rotations=rotations, views=views, per_layer=own)


def last_of_rows(x: Tensor, step: Step) -> Tensor:
    """Each row's last valid position of ``x`` [B, T, ...]: [B, 1, ...]. Of a row without any, position 0."""
    if step.width == 1:
        return x
    last = torch.tensor(step.counts, device=x.device).sub(1).clamp(min=0)
    return x[torch.arange(x.shape[0], device=x.device), last].unsqueeze(1)
