"""What the files of most mixtures call their tensors."""

from __future__ import annotations

from exactkv.models.families.family import Names

_MLP = "model.layers.{i}.mlp"

STACKED: Names = {
    "layers.{i}.mlp.router.weight": (f"{_MLP}.gate.weight",),
    "layers.{i}.mlp.experts.gate_up.weight": (f"{_MLP}.experts.gate_up_proj",),
    "layers.{i}.mlp.experts.down.weight": (f"{_MLP}.experts.down_proj",),
}
"""All experts of a layer in one tensor, as transformers holds them in memory."""

PER_EXPERT: Names = {
    "layers.{i}.mlp.experts.gate_up.weight": (
        f"{_MLP}.experts.{{e}}.gate_proj.weight",
        f"{_MLP}.experts.{{e}}.up_proj.weight",
    ),
    "layers.{i}.mlp.experts.down.weight": (f"{_MLP}.experts.{{e}}.down_proj.weight",),
}
"""Three tensors an expert, as the hub's files have them."""
