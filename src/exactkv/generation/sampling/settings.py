"""How tokens are chosen: the settings, their ranges, and which of them contradict each other."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from exactkv.cache.checks import is_int, is_number, listed, require
from exactkv.errors import InputError

if TYPE_CHECKING:
    from exactkv.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults change nothing and take the most probable token.

    The settings act in this order, each on what those before it left. First on the logits, also at temperature 0;
    "the text" is prompt and reply, whether they were fed or came from a cache:

    1. ``repetition_penalty``: logits of tokens of the text are divided by it where positive, multiplied where
       negative (Keskar et al., "CTRL", arXiv 1909.05858, section 4.1, in the form of its published code).
    2. ``frequency_penalty``, times the number of times that a token is in the text, and ``presence_penalty``, once
       where it is there, are subtracted (OpenAI's API reference, which counts the reply alone).
       ``penalty_window``: 1 and 2 look at the last so many tokens of the text; None: at all of it.
    3. DRY (P. E. Weidmann, text-generation-webui, pull request 5677): where the text's last n tokens have come
       before, ``dry_multiplier`` * ``dry_base`` ** (n - ``dry_allowed_length``) is subtracted from the token that
       followed there, if n >= ``dry_allowed_length``. n is 50 at most; ``dry_sequence_breakers`` are not penalised,
       and none is among the n tokens: token ids, or texts, each of which stands for the last token of "a" + text.
       ``dry_range``: look at the last so many tokens; None: at all.
    4. ``logit_bias``: token id -> what is added to its logit; kept as a tuple of pairs.
    5. ``banned_tokens`` are never chosen; where ``allowed_tokens`` is not None, no others are.

    Then, for a temperature above 0, on the probabilities; of equally probable tokens the lower ids come first:

    6. ``temperature`` divides the logits. At 0 the choice is made here: the greatest logit, of equal ones the lowest
       id.
    7. ``top_k``: the k most probable tokens (Fan et al., arXiv 1805.04833); 0: all.
    8. ``top_p``: the smallest set of most probable tokens whose probability reaches this (Holtzman et al., arXiv
       1904.09751).
    9. ``min_p``: those at least this times as probable as the most probable (Nguyen et al., arXiv 2407.01082).
    10. ``typical_p``: the smallest set that reaches this probability of the tokens whose -log p is nearest to the
        entropy (Meister et al., "Locally typical sampling", arXiv 2202.00666).
    11. XTC (P. E. Weidmann, text-generation-webui, pull request 6335, without its exception for newlines and end
        tokens): with probability ``xtc_probability``, of the tokens whose probability is at least ``xtc_threshold``
        all but the least probable are left out. Its coin is a function of seed and position.

    ``seed``: another seed, another sample; it plays no part at temperature 0.
    Raises InputError for values out of their ranges and for settings that contradict each other.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: Iterable[int | str] = ("\n", ":", '"', "*")
    dry_range: int | None = None
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    banned_tokens: Iterable[int] = ()
    allowed_tokens: Iterable[int] | None = None

    def __post_init__(self) -> None:
        self._check_ranges()
        bias = self.logit_bias
        pairs = list(bias.items()) if isinstance(bias, Mapping) else listed("logit_bias", bias)
        allowed = None if self.allowed_tokens is None else _ids("allowed_tokens", self.allowed_tokens)
        kept: dict[str, Any] = {
            "logit_bias": _bias(pairs),
            "banned_tokens": _ids("banned_tokens", self.banned_tokens),
            "allowed_tokens": allowed,
            "dry_sequence_breakers": _breakers(self.dry_sequence_breakers),
        }
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        self._check_contradictions()

    def _check_ranges(self) -> None:
        def number(name: str, holds: bool | None, expected: str) -> None:
            require(bool(holds), name, getattr(self, name), expected)

        def real(name: str) -> float:
            value = getattr(self, name)
            return float(value) if is_number(value) else math.nan

        number("temperature", 0 <= real("temperature") < math.inf, "a number >= 0")
        for name in ("top_p", "typical_p"):
            number(name, 0 < real(name) <= 1, "a number > 0 and <= 1")
        number("min_p", 0 <= real("min_p") <= 1, "a number from 0 to 1")
        number("xtc_probability", 0 <= real("xtc_probability") <= 1, "a number from 0 to 1")
        number(
            "xtc_threshold",
            0 < real("xtc_threshold") <= 0.5,
            "a number > 0 and <= 0.5: XTC needs two tokens that reach it",
        )
        number(
            "repetition_penalty",
            1e-6 <= real("repetition_penalty") <= 1e6,
            "a number from 1e-6 to 1e6; 1 changes nothing",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            number(name, abs(real(name)) <= 1e6, "a number from -1e6 to 1e6; 0 changes nothing")
        number("dry_multiplier", 0 <= real("dry_multiplier") <= 1e6, "a number from 0 to 1e6; 0: no DRY")
        number("dry_base", 1 <= real("dry_base") <= 100, "a number from 1 to 100")
        whole = "an integer from 0 to 2**63 - 1"
        number("seed", is_int(self.seed) and 0 <= self.seed < 1 << 63, whole)
        number("top_k", is_int(self.top_k) and self.top_k >= 0, "an integer >= 0; 0: all tokens")
        number(
            "dry_allowed_length", is_int(self.dry_allowed_length) and self.dry_allowed_length >= 1, "an integer >= 1"
        )
        for name in ("penalty_window", "dry_range"):
            value = getattr(self, name)
            number(
                name, value is None or (is_int(value) and value >= 1), "an integer >= 1, or None for all of the text"
            )

    def _check_contradictions(self) -> None:
        banned = set(self.banned)
        if self.temperature == 0 and (self.xtc_probability > 0 or self.typical_p < 1):
            name = "xtc_probability" if self.xtc_probability > 0 else "typical_p"
            raise InputError(
                f"temperature is 0, which takes the most probable token, and {name} is {getattr(self, name)}, which "
                f"may leave just that one out; give a temperature above 0, or leave out {name}"
            )
        if self.allowed is not None:
            if not self.allowed:
                raise InputError("allowed_tokens is empty, so nothing could be chosen; None allows all")
            if both := banned.intersection(self.allowed):
                raise InputError(f"token {min(both)} is in banned_tokens and in allowed_tokens; leave it out of one")
        allowed = None if self.allowed is None else set(self.allowed)
        for token, _ in self.bias:
            if token in banned or (allowed is not None and token not in allowed):
                where = "is in banned_tokens" if token in banned else "is not in allowed_tokens"
                raise InputError(f"logit_bias names token {token}, which {where}, so it is never chosen; leave it out")

    # The settings as they are kept, for readers.

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias``: pairs of token id and number, by id."""
        return self.logit_bias  # type: ignore[return-value]

    @property
    def banned(self) -> tuple[int, ...]:
        """``banned_tokens``, in order."""
        return self.banned_tokens  # type: ignore[return-value]

    @property
    def allowed(self) -> tuple[int, ...] | None:
        """``allowed_tokens``, in order."""
        return self.allowed_tokens  # type: ignore[return-value]

    @property
    def breakers(self) -> tuple[int | str, ...]:
        """``dry_sequence_breakers``."""
        return self.dry_sequence_breakers  # type: ignore[return-value]

    @cached_property
    def penalises(self) -> bool:
        """Whether there is a repetition, presence or frequency penalty."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @cached_property
    def reads_text(self) -> bool:
        """Whether a choice depends on the tokens before it, beyond the logits."""
        return self.penalises or self.dry_multiplier > 0

    @cached_property
    def edits(self) -> bool:
        """Whether some setting changes logits (1 to 5 of the order)."""
        return self.reads_text or bool(self.bias or self.banned) or self.allowed is not None

    @cached_property
    def filters(self) -> bool:
        """Whether some setting leaves tokens out by their probability (7 to 11 of the order)."""
        return (self.top_k, self.top_p, self.min_p, self.typical_p, self.xtc_probability) != (0, 1, 0, 1, 0)

    @cached_property
    def greatest_id(self) -> int:
        """The greatest token id that a setting names, -1 where none does."""
        named = [*(t for t, _ in self.bias), *self.banned, *(self.allowed or ())]
        return max([*named, *(b for b in self.breakers if isinstance(b, int))], default=-1)

    def resolved(self, tokenizer: Tokenizer | None) -> Sampling:
        """The same with token ids for DRY's breakers. Raises InputError where they need a missing tokenizer."""
        if self.dry_multiplier == 0 or all(isinstance(b, int) for b in self.breakers):
            return self
        if tokenizer is None:
            raise InputError(
                f"dry_sequence_breakers are {self.breakers!r} and this model has no tokenizer; "
                "give token ids, or () for none"
            )
        ids = (
            b if isinstance(b, int) else tokenizer.encode("a" + b, add_special_tokens=False)[-1] for b in self.breakers
        )
        return replace(self, dry_sequence_breakers=tuple(dict.fromkeys(ids)))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Sampling:
        """From names and values that come from outside (JSON: ids in ``logit_bias`` may be strings of digits). Raises
        InputError for names that are no settings."""
        known = [f.name for f in fields(cls)]
        unknown = [name for name in settings if name not in known]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise InputError(f"{unknown[0]!r} is no setting of sampling{hint} There are: {', '.join(known)}")
        given = dict(settings)
        if isinstance(given.get("logit_bias"), Mapping):
            given["logit_bias"] = [(_from_digits(token), value) for token, value in given["logit_bias"].items()]
        return cls(**given)


def _from_digits(token: Any) -> Any:
    return int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token


def _ids(name: str, given: Iterable[int]) -> tuple[int, ...]:
    ids = listed(name, given)
    for token in ids:
        require(is_int(token) and token >= 0, f"a token of {name}", token, "an integer >= 0")
    return tuple(sorted(set(ids)))


def _bias(pairs: list[Any]) -> tuple[tuple[int, float], ...]:
    kept: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"logit_bias holds {pair!r}; expected token ids with a number each, such as {{50: -1.5}}")
        token, value = pair
        require(is_int(token) and token >= 0, "a token of logit_bias", token, "an integer >= 0")
        if not is_number(value) or not math.isfinite(value):
            raise InputError(
                f"logit_bias of token {token} is {value!r}; expected a finite number. To never choose it, "
                "name it in banned_tokens."
            )
        if token in kept:
            raise InputError(f"logit_bias names token {token} twice; expected once")
        kept[token] = float(value)
    return tuple(sorted(kept.items()))


def _breakers(given: Iterable[int | str]) -> tuple[int | str, ...]:
    breakers = listed("dry_sequence_breakers", given)
    for breaker in breakers:
        holds = (isinstance(breaker, str) and breaker) or (is_int(breaker) and breaker >= 0)
        require(bool(holds), "one of dry_sequence_breakers", breaker, "a text or a token id")
    return tuple(breakers)


GREEDY = Sampling()
"""The most probable token, always."""
