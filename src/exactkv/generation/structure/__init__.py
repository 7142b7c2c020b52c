"""Constrained generation: texts that are JSON, or match a grammar or an expression, token by token (llguidance)."""

from exactkv.generation.structure.matcher import Matcher
from exactkv.generation.structure.structure import Structure

__all__ = ["Matcher", "Structure"]
