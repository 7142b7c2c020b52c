"""The GGUF architectures that can be read, by the name in `general.architecture`."""

from exactkv.models.gguf.architectures import dense, gemma, llama, mixtures, qwen, recurrent
from exactkv.models.gguf.architectures.architecture import Architecture, Table

ARCHITECTURES: Table = {
    name: architecture
    for group in (llama, qwen, gemma, dense, mixtures, recurrent)
    for name, architecture in group.ARCHITECTURES.items()
}

__all__ = ["ARCHITECTURES", "Architecture"]
