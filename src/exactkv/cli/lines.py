"""The lines of `exactkv generate --file`: what one asks for, and what one of its results says."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from exactkv.cache.checks import is_int
from exactkv.cli.generate import as_prompt
from exactkv.cli.output import told_logprobs, usage
from exactkv.errors import InputError
from exactkv.generation import Sampling

if TYPE_CHECKING:
    from exactkv.generation import Completion
    from exactkv.models.model import Model

Id = str | int
TEXT_SETTINGS = ("max_tokens", "stop", "include_stop", "stop_token_ids", "deadline", "logprobs")
SAMPLING_SETTINGS = tuple(f.name for f in fields(Sampling))
KNOWN = ("id", "prompt", "messages", *TEXT_SETTINGS, *SAMPLING_SETTINGS)
BEGINNING = b'{"id": '
"""With which each line of results begins."""


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises InputError where it is none."""
    try:
        content = json.loads(raw.decode(), parse_int=_integer, parse_constant=_constant)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"the line is not valid UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"the line is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f'the line is {_shown(content)}; expected an object such as {{"prompt": "Hello"}}')
    return content


def id_of(content: Mapping[str, Any], number: int) -> Id:
    """The id of what a line asks for: its own, or the line's ``number``."""
    given = content.get("id")
    given = number if given is None else given
    if not isinstance(given, str) and not is_int(given):
        raise InputError(f"id is {_shown(given)}; expected a text or an integer")
    return given


@dataclass(frozen=True)
class Defaults:
    """What holds for lines that do not say otherwise. ``texts``: settings of `stream`; ``chat`` and ``system``: how a
    prompt that is a text is put."""

    texts: Mapping[str, Any]
    sampling: Sampling
    chat: bool | None = None
    system: str | None = None

    def request(self, content: Mapping[str, Any], model: Model) -> dict[str, Any]:
        """What a line asks for, as `generate_each` takes it. Raises InputError where the line does not fit; the values
        of settings are checked by those who use them."""
        content = {name: value for name, value in content.items() if value is not None}  # null: not said
        for name in content:
            if name not in KNOWN:
                near = difflib.get_close_matches(name, KNOWN, n=1)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise InputError(f"{name!r} is no field of a line{hint} There are: {', '.join(KNOWN)}")
        own = {name: content[name] for name in SAMPLING_SETTINGS if name in content}
        sampling = self.sampling
        if own:
            sampling = Sampling.from_dict({**{name: getattr(sampling, name) for name in SAMPLING_SETTINGS}, **own})
        texts = {name: content[name] for name in TEXT_SETTINGS if name in content}
        return {"prompt": self._prompt(content, model), **self.texts, **texts, "sampling": sampling}

    def _prompt(self, content: Mapping[str, Any], model: Model) -> Any:
        if ("prompt" in content) == ("messages" in content):
            given = "both" if "prompt" in content else "neither"
            raise InputError(f"the line has {given} of prompt and messages; expected one of them")
        if "messages" in content:
            messages = content["messages"]
            if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
                raise InputError(
                    f"messages is {_shown(messages)}; expected a list of objects such as "
                    '{"role": "user", "content": "Hello"}'
                )
            return messages
        prompt = content["prompt"]
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("the prompt is empty; expected some text, or token ids")
            return as_prompt(model, prompt, self.chat, self.system)
        if not isinstance(prompt, list) or not all(map(is_int, prompt)):
            raise InputError(f"prompt is {_shown(prompt)}; expected a text or a list of token ids")
        return prompt


def result_line(identity: Id, model: Model, result: Completion) -> bytes:
    """The line of a result that came to its end."""
    assert result.usage is not None
    content: dict[str, Any] = {
        "id": identity,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "matched": result.matched,
        "tokens": list(result.tokens),
        "usage": usage(result.usage, len(result.tokens)),
    }
    if result.logprobs:
        content["logprobs"] = told_logprobs(model, result.logprobs)
    return _line(content)


def error_line(identity: Id, number: int, error: InputError) -> bytes:
    """The line that says why line ``number`` has no result."""
    return _line({"id": identity, "error": {"message": str(error), "line": number}})


def read_result(raw: bytes) -> tuple[Id, bool] | None:
    """The id of a line of results, and whether it is an error; None where it is no such line."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not (isinstance(content.get("id"), str) or is_int(content.get("id"))):
        return None
    if isinstance(content.get("error"), dict) and "message" in content["error"]:
        return content["id"], True
    return (content["id"], False) if content.keys() >= {"text", "finish_reason", "tokens", "usage"} else None


def _line(content: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape and UTF-8 cannot say
        return (json.dumps(content, allow_nan=False) + "\n").encode()


def _integer(digits: str) -> int:
    if len(digits) > 19 or not -(1 << 63) <= int(digits) < 1 << 63:
        raise InputError(f"the line has the number {_shown(digits)}; expected integers from -2**63 to 2**63 - 1")
    return int(digits)


def _constant(name: str) -> Any:
    raise InputError(f"the line has {name}, which is not JSON; expected a number")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"
