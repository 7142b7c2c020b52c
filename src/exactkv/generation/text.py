"""One text under way: its prompt, what has been generated, how its tokens are chosen and what ends it.

Shared by the loop of a single text and the engine of many: a text does not know which cache it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from exactkv.cache.checks import is_int
from exactkv.errors import InputError
from exactkv.generation.prompts import Prompt, end_token_ids, prompt_ids
from exactkv.generation.sampling import GREEDY, Choice, History, Logprobs, Sampling, choose, choose_run
from exactkv.generation.scores import PromptScores
from exactkv.generation.stopping import Ending, Stopping
from exactkv.models.model import Model


@dataclass(frozen=True)
class Piece:
    """What has been added since the piece before.

    ``tokens``: the ids generated since; text may come later than its tokens, where it was held back, and an end
    token and a stop string have none. ``finish_reason``: None but in the last piece: "stop" at an end token or a stop
    string, ``matched`` then being which; "length" at max_tokens or at the model's maximum; "deadline".
    ``logprobs``: one a token, () where they were not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None = None
    matched: str | int | None = None
    logprobs: tuple[Logprobs, ...] = ()


class Text:
    """``prompt``: token ids; ``generated``: those chosen so far, ``logprobs`` theirs where asked for; ``shown``: what
    pieces said so far. ``limit``: the most tokens that prompt and reply may have. ``scores``: log-probabilities of the
    prompt's tokens, where an engine is to tell them, else None."""

    def __init__(
        self,
        model: Model,
        prompt: Sequence[int],
        stopping: Stopping,
        sampling: Sampling = GREEDY,
        num_logprobs: int | None = None,
        limit: int | None = None,
    ):
        self.prompt, self.stopping, self.limit = tuple(prompt), stopping, limit
        self.sampling, self.num_logprobs = sampling.resolved(model.tokenizer), num_logprobs
        self.generated: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.scores: PromptScores | None = None
        self.shown = ""
        self.ending = Ending(stopping, model.tokenizer)
        self._ids = list(prompt)
        self._history = History(prompt) if sampling.reads_text else None
        self._silent = model.tokenizer is None
        self._told = 0
        self._unsaid = ""
        self._ended = False

    @property
    def ids(self) -> Sequence[int]:
        """Prompt and reply. Not to be changed."""
        return self._ids

    @property
    def room(self) -> int:
        """How many more tokens it may have."""
        room = self.stopping.max_tokens - len(self.generated)
        return room if self.limit is None else min(room, self.limit + 1 - len(self._ids))

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of its prompt are wanted that are not known yet."""
        return self.scores is not None and not self.scores.complete

    def choose(self, logits: Tensor, guess: Sequence[int] = ()) -> Choice:
        """Choose from ``logits`` [T, V] the next tokens, as if the T - 1 tokens of ``guess`` came true."""
        if len(guess) == 0:
            position = [len(self._ids)]
            return choose(logits, [self.sampling], position, [self._history], [self.num_logprobs])
        return choose_run(logits, self.sampling, len(self._ids), self._history, guess, self.num_logprobs)

    @staticmethod
    def choose_each(texts: Sequence[Text], logits: Tensor) -> Choice:
        """The next token of each text, from its row of ``logits`` [B, V]."""
        given = [(t.sampling, len(t._ids), t._history, t.num_logprobs) for t in texts]
        samplings, positions, histories, asked = zip(*given, strict=True)
        return choose(logits, samplings, positions, histories, asked)

    def take(self, tokens: Sequence[int], logprobs: Sequence[Logprobs | None], guess: Sequence[int] = ()) -> None:
        """Add the first of ``tokens``, and of the others as many as follow a guess that came true, up to the text's
        end."""
        for i, token in enumerate(tokens):
            full = self.limit is not None and len(self._ids) >= self.limit
            self.generated.append(token)
            self._ids.append(token)
            told = logprobs[i]
            if told is not None:
                self.logprobs.append(told)
            if self._history is not None:
                self._history.append(token)
            self._unsaid += self.ending.feed(token, full)
            if self.ending.reason is not None or i >= len(guess) or guess[i] != token:
                break

    def give_up(self) -> None:
        """The deadline is over."""
        self._unsaid += self.ending.give_up()

    def piece(self) -> Piece | None:
        """What has come since the last piece; None where there is nothing to say, or it is held back."""
        new = self._told < len(self.generated) or (self.ending.reason is not None and not self._ended)
        if not new or not (self._unsaid or self._silent or self.ending.reason is not None):
            return None
        said, self._unsaid = self._unsaid, ""
        self.shown += said
        self._ended = self.ending.reason is not None
        start, self._told = self._told, len(self.generated)
        tokens, logprobs = tuple(self.generated[start:]), tuple(self.logprobs[start:])
        return Piece(said, tokens, self.ending.reason, self.ending.matched, logprobs)


def make_text(
    model: Model,
    prompt: Prompt,
    max_tokens: int = 256,
    sampling: Sampling = GREEDY,
    stop_token_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    include_stop: bool = False,
    deadline: float | None = None,
    logprobs: int | None = None,
    limit: int | None = None,
) -> Text:
    """A text from what users give; see `stream`. Raises InputError where an argument does not fit."""
    if not isinstance(model, Model):
        raise InputError(f"model is a {type(model).__name__}; expected one made by exactkv.load")
    if not isinstance(sampling, Sampling):
        raise InputError(f"sampling is {sampling!r}; expected exactkv.Sampling(temperature=..., top_p=..., seed=...)")
    if sampling.greatest_id >= model.spec.vocab_size:
        raise InputError(
            f"sampling names token {sampling.greatest_id}; the vocabulary is 0 to {model.spec.vocab_size - 1}"
        )
    if logprobs is not None and (not is_int(logprobs) or logprobs < 0):
        raise InputError(f"logprobs is {logprobs!r}; expected how many top tokens to tell, an integer >= 0, or None")
    ids = prompt_ids(model, prompt)
    limit = model.spec.max_length if limit is None else limit
    if len(ids) > limit:
        raise InputError(f"the prompt has {len(ids)} tokens; at most {limit} fit. Shorten it.")
    ends = end_token_ids(model) if stop_token_ids is None else stop_token_ids
    stopping = Stopping(max_tokens, ends, stop, include_stop, deadline)
    vocab_size = model.spec.vocab_size
    if stop_token_ids is not None and (wrong := [i for i in stopping.token_ids if not 0 <= i < vocab_size]):
        raise InputError(f"stop_token_ids name token {wrong[0]}; the vocabulary is 0 to {vocab_size - 1}")
    return Text(model, ids, stopping, sampling, logprobs, limit)
