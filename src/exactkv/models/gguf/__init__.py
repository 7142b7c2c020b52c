"""GGUF model files: reading, dequantization, translation to Hugging Face terms."""

from exactkv.models.gguf.source import GGUFSource

__all__ = ["GGUFSource"]
