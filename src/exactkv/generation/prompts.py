"""The token ids of a prompt, in whichever form it comes, and those that end a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from exactkv.errors import InputError
from exactkv.models.model import Model

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or messages ({"role": ..., "content": ...}) for the model's chat template."""


def prompt_ids(model: Model, prompt: Prompt) -> list[int]:
    """The token ids of a prompt in any of its forms. Raises InputError where it is empty or none of them."""
    given: Any = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    tokenizer, vocab_size = model.tokenizer, model.spec.vocab_size
    is_chat = isinstance(given, Sequence) and len(given) > 0 and all(isinstance(m, Mapping) for m in given)
    if isinstance(given, str) or is_chat:
        if tokenizer is None:
            raise InputError("this model has no tokenizer, so its prompt must be a list of token ids")
        ids = tokenizer.encode(given) if isinstance(given, str) else tokenizer.apply_chat_template(given)
    elif isinstance(given, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in given):
        ids = list(given)
    else:
        shown = str(given) if len(str(given)) <= 80 else f"{str(given)[:80]}…"
        raise InputError(
            f"the prompt is {shown!r}; expected one text, one list of token ids, or one list of messages "
            'like {"role": "user", "content": "Hello"}'
        )
    if not ids:
        raise InputError("the prompt is empty; expected at least one token, such as the model's bos token")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InputError(f"token id {wrong} of the prompt is outside the vocabulary: 0 to {vocab_size - 1}")
    return ids


def end_token_ids(model: Model) -> frozenset[int]:
    """The tokens that end a text: those of the model's generation config and of its tokenizer."""
    configured = model.generation_config.get("eos_token_id")
    ids = {configured} if isinstance(configured, int) else set(configured or ())
    return frozenset(ids | set(model.tokenizer.eos_token_ids if model.tokenizer is not None else ()))
