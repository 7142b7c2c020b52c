"""The model `exactkv` of the LM Evaluation Harness (lm-eval).

Importing this module registers it. lm-eval 0.4 loads no plugins, so its own command does not know of it; this one
is the same command with the model registered:

    python -m exactkv.integrations.lm_eval run --model exactkv --model_args pretrained=PATH --tasks ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exactkv.cache.store import PromptStore
from exactkv.errors import ExactKVError, InputError
from exactkv.generation import Completion, Sampling, generate_each
from exactkv.integrations.scoring import Pair, score
from exactkv.models.load import load
from exactkv.models.model import Model
from exactkv.models.tokenizer import Tokenizer

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from tqdm import tqdm
except ImportError as error:
    raise InputError(f"lm-eval is not installed ({error}): pip install 'exactkv[eval]'") from error

DEFAULT_ROWS = 32
SAMPLING = ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "seed")
IGNORED = {"num_beams": 1, "use_cache": True, "early_stopping": False, "length_penalty": 1.0}
"""Settings of transformers, with the value that changes nothing."""


class ExactKVLM(TemplateLM):  # type: ignore[misc]
    """Log-likelihoods and generations by exactkv, as lm-eval's `hf` model gives them.

    ``pretrained``: what `exactkv.load` takes, or a model. ``batch_size``: rows at once, "auto" for 32. ``max_length``:
    the most tokens of a context and its continuation (default: the model's). ``add_bos_token``: whether texts begin
    with the bos token (default: as the tokenizer does it). ``prefix_token_id``: what stands for an empty context
    (default: bos, else the end token). ``prompt_cache_bytes``: for prompts of generations that begin alike.
    Raises InputError where an argument does not fit, LoadError where the model cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str | Model,
        batch_size: int | str | None = None,
        max_batch_size: int | str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        prompt_cache_bytes: int = 1_000_000_000,
        **others: Any,
    ):
        super().__init__()
        if others:
            raise InputError(f"the model exactkv has no argument {', '.join(others)}")
        self.model = pretrained if isinstance(pretrained, Model) else load(pretrained, device or "auto", dtype)
        if self.model.tokenizer is None:
            raise InputError(f"{self.model.name} has no tokenizer; lm-eval's tasks are texts")
        self.tokenizer: Tokenizer = self.model.tokenizer
        self.batch_size = _rows(batch_size, max_batch_size)
        longest = self.model.spec.max_length
        self.max_length = longest if max_length is None else min(int(max_length), longest)
        self.max_gen_toks, self.add_bos_token, self._prefix = max_gen_toks, add_bos_token, prefix_token_id
        self.think_end_token, self._store = think_end_token, PromptStore(int(prompt_cache_bytes))
        self._device = self.model.device

    # What lm-eval asks of a tokenizer.

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        if not self.tokenizer.eos_token_ids:
            raise InputError(f"{self.model.name} has no end token; give prefix_token_id")
        return self.tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context."""
        given = self.tokenizer.bos_token_id if self._prefix is None else self._prefix
        return self.eot_token_id if given is None else given

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's caches of requests."""
        return self.model.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, where it is asked for."""
        if isinstance(chat_template, str):
            raise InputError(f"the chat template {chat_template!r} was asked for; this model has just its own")
        return self.tokenizer.chat_template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text. Without ``add_generation_prompt`` it ends with the last message's own text."""
        try:
            text = self.tokenizer.render_chat_template(chat_history, add_generation_prompt)
        except InputError:  # some templates know no system message; so does lm-eval's own model
            chat_history = [message for message in chat_history if message["role"] != "system"]
            text = self.tokenizer.render_chat_template(chat_history, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        end = text.rfind(last) + len(last)
        return text[: end + len(chat_history[-1]["content"]) - len(chat_history[-1]["content"].rstrip())]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A text's token ids; a bos token that it begins with already is not added again."""
        if add_special_tokens is None:
            begun = string.startswith(self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False))
            add_special_tokens = not begun and self.add_bos_token is not False
        ids = self.tokenizer.encode(string, add_special_tokens)
        bos = self.tokenizer.bos_token_id
        if add_special_tokens and self.add_bos_token and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    # What it asks of a model.

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitted(context, continuation) for _, context, continuation in requests]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        asked = [place for place, pair in enumerate(pairs) if pair[1]]
        bar = tqdm(total=len(asked), disable=disable_tqdm, desc="Running loglikelihood requests")
        for number, scored in score(self.model, [pairs[place] for place in asked], self.batch_size):
            place = asked[number]
            results[place] = (scored.logprob, scored.greedy)
            if requests[place][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[place][0], results[place])
            bar.update(1)
        bar.close()
        return results

    def _fitted(self, context: Sequence[int], continuation: Sequence[int]) -> Pair:
        """Cut from the left what is too long."""
        if not context or len(continuation) > self.max_length:
            raise InputError(
                f"a context of {len(context)} tokens and a continuation of {len(continuation)}; expected at least one, "
                f"and at most {self.max_length}"
            )
        cut = max(0, len(context) + len(continuation) - self.max_length - 1)
        return tuple(context[cut:]), tuple(continuation)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, all of its tokens, in windows where it is too long."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for place, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            for window in map(utils.make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(place)
        totals = [0.0] * len(requests)
        for place, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[place] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A text for each request, up to its stop strings."""
        asked = [self._prompt(request.args, number) for number, request in enumerate(requests)]
        order = sorted(range(len(asked)), key=lambda place: asked[place]["prompt"])  # what begins alike comes together
        results = [""] * len(asked)
        bar = tqdm(total=len(asked), disable=disable_tqdm, desc="Running generate_until requests")
        for done in generate_each(
            self.model, (asked[place] for place in order), max_rows=self.batch_size, store=self._store,
            step_tokens=max(512, self.batch_size),
        ):  # fmt: skip
            place = order[done.index]
            results[place] = self._said(done, asked[place]["stop"])
            context, given = requests[place].args
            self.cache_hook.add_partial("generate_until", (context, given), results[place])
            bar.update(1)
        bar.close()
        return results

    def _prompt(self, arguments: tuple[str, Mapping[str, Any]], number: int) -> dict[str, Any]:
        """What `generate_each` takes for a request."""
        context, given = arguments
        settings = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        until, most = settings.pop("until", None) or [], settings.pop("max_gen_toks")
        sampled, temperature = settings.pop("do_sample", False), settings.pop("temperature", 0.0)
        chosen = {name: settings.pop(name) for name in SAMPLING if settings.get(name) is not None}
        for name, value in settings.items():
            if value is not None and not (name in IGNORED and value == IGNORED[name]):
                raise InputError(f"a task asks for {name}={value!r}, which the model exactkv does not know")
        room = self.max_length - most
        if room < 1:
            raise InputError(f"a task asks for {most} new tokens; the model has room for {self.max_length}, all in all")
        if not sampled or not temperature:
            chosen = {name: value for name, value in chosen.items() if name == "repetition_penalty"}
            temperature = 0.0
        else:  # repeats of one request are to differ
            chosen["seed"] = chosen.get("seed", 0) + number
        stop = [until] if isinstance(until, str) else list(until)
        ids = self.tok_encode(context)[-room:]
        return {
            "prompt": ids or [self.prefix_token_id],
            "max_tokens": most,
            "stop": [text for text in stop if text],
            "sampling": Sampling(temperature=temperature, **chosen),
        }

    def _said(self, done: Completion, stop: list[str]) -> str:
        if done.error is not None:
            raise done.error
        return str(postprocess_generated_text(done.text, stop, self.think_end_token))

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        return {
            "model_name": self.model.name,
            "model_num_parameters": sum(weight.numel() for weight in self.model.decoder.weights.values()),
            "model_dtype": str(self.model.dtype),
            "model_sha": self.model.fingerprint,
        }


def _rows(batch_size: int | str | None, most: int | str | None) -> int:
    given = DEFAULT_ROWS if batch_size is None or str(batch_size).startswith("auto") else batch_size
    try:
        rows = int(given) if most is None else min(int(given), int(most))
    except ValueError:
        rows = 0
    if rows < 1:
        raise InputError(f'batch_size is {batch_size!r}; expected a number of rows >= 1, or "auto"')
    return rows


register_model("exactkv")(ExactKVLM)


def main() -> None:
    """lm-eval's command."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ExactKVError as error:
        raise SystemExit(f"exactkv: {error}") from None


if __name__ == "__main__":
    main()
