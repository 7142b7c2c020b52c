"""From what requests say to texts for the engine: prompts, sampling, limits."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from exactkv.cache.checks import is_number
from exactkv.errors import InputError
from exactkv.generation.prompts import prompt_ids
from exactkv.generation.sampling import Sampling
from exactkv.generation.scores import PromptScores
from exactkv.generation.text import Text, make_text
from exactkv.models.model import Model
from exactkv.serve.errors import Refusal
from exactkv.serve.schema.base import SamplingFields
from exactkv.serve.structure import PLAIN, Form, shaped

SETTINGS = {field.name for field in fields(Sampling)}
OF_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings whose default a model's generation config may name."""
RESERVED = {"messages", "tools", "add_generation_prompt", "self"}
MOST_BIAS = 1e4


@dataclass(frozen=True)
class TextMaker:
    """Makes texts of one model. ``limit``: the most tokens of a prompt with its reply; ``timeout``: seconds of one."""

    model: Model
    limit: int
    timeout: float

    def sampling(self, asked: SamplingFields) -> Sampling:
        """The settings that a request names, else the model's own, else those of the APIs: temperature 1."""
        given = {name: getattr(asked, name) for name in asked.model_fields_set if name in SETTINGS}
        given = {name: value for name, value in given.items() if value is not None}
        seed = given.pop("seed", None)
        settings: dict[str, Any] = {"temperature": 1.0, **self._defaults(), **given}
        settings["seed"] = (secrets.randbits(63) if seed is None else seed) % (1 << 63)
        settings["top_k"] = min(max(0, int(settings.get("top_k", 0))), self.model.spec.vocab_size)
        bias = settings.get("logit_bias") or {}
        if any(abs(value) > MOST_BIAS for value in bias.values()):
            raise InputError(f"logit_bias holds a number beyond {MOST_BIAS:g}; expected numbers from -100 to 100")
        return Sampling.from_dict(settings)

    def _defaults(self) -> dict[str, Any]:
        config = self.model.generation_config
        if config.get("do_sample") is False:
            return {}
        named = {name: config.get(name) for name in OF_THE_MODEL}
        return {name: value for name, value in named.items() if is_number(value)}

    def text(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        scores: int | None = None,
        form: Form = PLAIN,
    ) -> Text:
        """A text after ``prompt``; its reply has at most ``max_tokens``, and what the limit leaves. ``scores``: of how
        many top tokens to tell the log-probability at each place of the prompt."""
        self.check_length(len(prompt))
        room = self.limit + 1 - len(prompt)
        made = make_text(
            self.model,
            prompt,
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            sampling=sampling,
            stop_token_ids=() if ignore_eos else None,
            stop=stop or (),
            deadline=self.timeout,
            logprobs=logprobs,
            limit=self.limit,
            **shaped(self.model, form, prompt),
        )
        if scores is not None:
            made.scores = PromptScores(made.prompt, scores)
        return made

    def texts(self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, **options: Any) -> list[Text]:
        """``count`` texts of each prompt; of one prompt each next one has the next seed."""
        samplings = [replace(sampling, seed=(sampling.seed + i) % (1 << 63)) for i in range(count)]
        return [self.text(prompt, each, **options) for prompt in prompts for each in samplings]

    def check_length(self, count: int) -> None:
        """Raise Refusal where a prompt of so many tokens is too long."""
        if count > self.limit:
            raise Refusal(
                400, f"the prompt has {count} tokens; at most {self.limit} fit with the reply. Shorten it.", "messages",
                "context_length_exceeded",
            )  # fmt: skip

    def encoded(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a text, or those given, checked."""
        if isinstance(prompt, str) and len(prompt) > 64 * self.limit:
            raise Refusal(400, f"the prompt has {len(prompt)} characters; at most {self.limit} tokens fit. Shorten it.",
                          "prompt", "context_length_exceeded")  # fmt: skip
        return prompt_ids(self.model, prompt)

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        answer: bool = True,
        go_on: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of messages as the chat template puts them. ``answer``: with what begins an answer; ``go_on``: up
        to where the last message's text ends, so that it is gone on with."""
        if self.model.tokenizer is None:
            raise InputError("this model has no tokenizer, so it takes token ids alone: use /v1/completions")
        if wrong := RESERVED & set(variables or ()):
            raise InputError(f"chat_template_kwargs hold {min(wrong)!r}, which has a field of its own")
        tokenizer = self.model.tokenizer
        text = tokenizer.render_chat_template(messages, answer and not go_on, tools, **dict(variables or {}))
        if go_on:
            last = str(messages[-1].get("content") or "").rstrip()
            end = text.rfind(last)
            if end < 0 or not last:
                raise InputError("the last message cannot be gone on with: the chat template changes its text")
            text = text[: end + len(last)]
        return tokenizer.encode(text, add_special_tokens=False)

    def knows_role(self, role: str) -> bool:
        """Whether the chat template speaks of a role."""
        tokenizer = self.model.tokenizer
        return tokenizer is not None and role in (tokenizer.chat_template or "")


def parsed_arguments(arguments: str) -> Any:
    """A call's arguments as chat templates want them: a mapping, where they are one."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
