"""What a deliberate fault is, and the engines into which faults are put."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from exactkv.cache import AttentionPattern
from exactkv.verify.target import Target
from exactkv.verify.targets.exactkv import ExactKVTarget
from tests.tiny import tiny_model
from tests.verify.toy import Config, LayerConfig, ToyTarget

Make = Callable[[int], Target]


class Patches:
    """Replaces attributes for as long as the fault is in. Call it with an owner, a name, and what to put there."""

    def __init__(self, stack: ExitStack):
        self.stack = stack

    def __call__(self, owner: Any, name: str, replacement: Any) -> None:
        self.stack.enter_context(mock.patch.object(owner, name, replacement))


@dataclass(frozen=True)
class Fault:
    """``kind``: a letter of the 20 kinds. ``target``: makes an engine with the fault in it, for a seed of weights.
    ``schedules``: a few by which it is caught, for a quick test."""

    kind: str
    name: str
    about: str
    target: Callable[[int], AbstractContextManager[Target]]
    schedules: tuple[str, ...]


FAULTS: list[Fault] = []


def fault(kind: str, make: Make, schedules: str | Sequence[str]) -> Callable[[Callable[[Patches], None]], Fault]:
    """The function puts the fault in; its name and docstring are the fault's."""

    def register(put_in: Callable[[Patches], None]) -> Fault:
        @contextmanager
        def target(seed: int) -> Iterator[Target]:
            with ExitStack() as stack:
                put_in(Patches(stack))
                yield make(seed)

        about = " ".join((put_in.__doc__ or "").split())
        names = (schedules,) if isinstance(schedules, str) else tuple(schedules)
        made = Fault(kind, put_in.__name__.replace("_", " "), about, target, names)
        FAULTS.append(made)
        return made

    return register


def toy(*layers: LayerConfig, **config: Any) -> Make:
    return lambda seed: ToyTarget(Config(layers, **config), seed)


def tiny(*patterns: AttentionPattern) -> Make:
    """exactkv's own engine."""
    return lambda seed: ExactKVTarget(tiny_model(patterns, seed=seed))


def full(**options: Any) -> LayerConfig:
    return LayerConfig(**options)


def sliding(size: int = 6, **options: Any) -> LayerConfig:
    return LayerConfig("sliding", size, **options)


def chunked(size: int = 5, **options: Any) -> LayerConfig:
    return LayerConfig("chunked", size, **options)


def recurrent() -> LayerConfig:
    return LayerConfig("recurrent")
