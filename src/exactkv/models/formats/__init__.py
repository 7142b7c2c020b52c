"""Quantized weights in Hugging Face directories, presented as the tensors that they stand for."""

from exactkv.models.formats.source import open_directory

__all__ = ["open_directory"]
