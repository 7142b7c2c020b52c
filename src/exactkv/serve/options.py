"""What whoever runs a server decides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from exactkv.cache.checks import is_int, is_number, require


@dataclass(frozen=True)
class ServeOptions:
    """Limits and manners of a server.

    ``names``: of the model, as requests may call it, the first as the server does; "*" lets them call it anything; ():
    the model's own. ``api_keys``: one of them is required, () for none; each sees a prompt cache of its own.
    ``max_batch``: texts generated at once; ``queue``: texts that may wait beside, more are told to come back later.
    ``max_context``: the most tokens of a prompt with its reply, None for the model's maximum; ``max_bytes``: of caches,
    None for no limit. ``timeout``: seconds of one request, waiting too; ``grace``: seconds that running replies have
    when the server ends. ``body_bytes``: the most of a request. ``cors``: origins whose pages may call it, "*" for all.
    ``hosts``: names by which it may be called, beside its address, where it listens on loopback alone ("*": any).
    ``log_prompts``: write prompts and replies to the log.
    Raises InputError where a value does not fit.
    """

    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_batch: int = 32
    queue: int = 128
    max_context: int | None = None
    max_bytes: int | None = None
    timeout: float = 600.0
    grace: float = 30.0
    body_bytes: int = 16 << 20
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("*",)
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("queue", 0), ("body_bytes", 1)):
            value = getattr(self, name)
            require(is_int(value) and value >= least, name, value, f"an integer >= {least}")
        for name in ("max_context", "max_bytes"):
            value = getattr(self, name)
            require(value is None or (is_int(value) and value >= 1), name, value, "an integer >= 1, or None")
        for name, lowest in (("timeout", 0.0), ("grace", -1.0)):
            value = getattr(self, name)
            fits = is_number(value) and lowest < value < math.inf
            require(fits, name, value, "seconds, a number above 0" if name == "timeout" else "seconds, a number >= 0")
        require(self.grace >= 0, "grace", self.grace, "seconds, a number >= 0")
        wrong = [key for key in self.api_keys if not (key and key.isascii() and key.isprintable() and " " not in key)]
        require(not wrong, "an API key", wrong, "printable ASCII without spaces, not empty")
