"""A small engine in plain numpy that has every ability a `Target` may have, each written the plain way.

It is exact, and made so that a fault can be put into one small method: see tests/faults.
"""

from tests.verify.toy.model import Config, LayerConfig
from tests.verify.toy.target import ToyTarget

__all__ = ["Config", "LayerConfig", "ToyTarget"]
