"""One text under way: its prompt, what has been generated, how its tokens are chosen and what ends it.

Shared by the loop of a single text and the engine of many: a text does not know which cache it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exactkv.cache.checks import is_int, require
from exactkv.errors import InputError
from exactkv.generation.prompts import Prompt, end_token_ids, prompt_ids
from exactkv.generation.sampling import GREEDY, Choice, History, Logprobs, Sampling, choose, choose_run
from exactkv.generation.scores import PromptScores
from exactkv.generation.stopping import Ending, Stopping
from exactkv.generation.structure import Matcher, Structure
from exactkv.models.model import Model


@dataclass(frozen=True)
class Piece:
    """What has been added since the piece before.

    ``tokens``: the ids generated since; text may come later than its tokens, where it was held back, and an end
    token and a stop string have none. ``finish_reason``: None but in the last piece: "stop" at an end token or a stop
    string, ``matched`` then being which, and where its structure is complete; "length" at max_tokens or at the model's
    maximum; "deadline".
    ``logprobs``: one a token, () where they were not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None = None
    matched: str | int | None = None
    logprobs: tuple[Logprobs, ...] = ()


class Text:
    """``prompt``: token ids. ``limit``: the most tokens that prompt and reply may have. ``structure``: what the reply
    must look like. ``show_special_tokens``: they are part of what is shown. ``scores``: log-probabilities
    of the prompt's tokens, where an engine is to tell them, else None.

    The tokens taken are all that is stored; ``generated``, ``logprobs``, ``shown`` and ``ending`` follow from them, and
    are made anew where something interrupted what brought them up to date.
    """

    def __init__(
        self,
        model: Model,
        prompt: Sequence[int],
        stopping: Stopping,
        sampling: Sampling = GREEDY,
        num_logprobs: int | None = None,
        limit: int | None = None,
        structure: Structure | None = None,
        show_special_tokens: bool = False,
    ):
        self.prompt, self.stopping, self.limit, self.structure = tuple(prompt), stopping, limit, structure
        self.sampling, self.num_logprobs = sampling.resolved(model.tokenizer), num_logprobs
        ends, size = frozenset(stopping.token_ids), model.spec.vocab_size
        self._matcher = None if structure is None else Matcher(structure, model.tokenizer, size, ends)
        self.scores: PromptScores | None = None
        self._silent = model.tokenizer is None
        self._taken: list[tuple[int, Logprobs | None]] = []
        self._given_up = False
        self._told = (0, 0, False)  # tokens, characters, and whether it has ended
        self._ending = Ending(stopping, model.tokenizer, show_special_tokens)
        self._begin()

    def _begin(self) -> None:
        """What follows from no token."""
        self._generated: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._ids = list(self.prompt)
        self._history = History(self.prompt) if self.sampling.reads_text else None
        self._ending = self._ending.anew()
        self._said = ""
        self._torn = False

    def _settle(self) -> None:
        """Bring what follows from the tokens up to them."""
        if not self._torn and len(self._generated) == len(self._taken) and self._given_up <= self._ending.given_up:
            return
        if self._torn:
            self._begin()
        self._torn = True  # until all is done
        for i in range(len(self._generated), len(self._taken)):
            token, told = self._taken[i]
            full = self.limit is not None and len(self._ids) >= self.limit
            self._generated.append(token)
            self._ids.append(token)
            if told is not None:
                self._logprobs.append(told)
            if self._history is not None:
                self._history.append(token)
            more = i + 1 < len(self._taken)
            self._said += self._ending.feed(token, full, not more and self._completed(token), more)
        if self._given_up and not self._ending.given_up:
            self._said += self._ending.give_up()
        self._torn = False

    @property
    def generated(self) -> list[int]:
        """The tokens chosen so far."""
        self._settle()
        return self._generated

    @property
    def logprobs(self) -> list[Logprobs]:
        """Theirs, where asked for."""
        self._settle()
        return self._logprobs

    @property
    def ending(self) -> Ending:
        """What ends it, and has."""
        self._settle()
        return self._ending

    @property
    def shown(self) -> str:
        """Its text, but for what may turn out to belong to a stop string or an incomplete character."""
        self._settle()
        return self._said

    @property
    def ids(self) -> Sequence[int]:
        """Prompt and reply. Not to be changed."""
        self._settle()
        return self._ids

    @property
    def room(self) -> int:
        """How many more tokens it may have."""
        room = self.stopping.max_tokens - len(self.generated)
        return room if self.limit is None else min(room, self.limit + 1 - len(self.ids))

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of its prompt are wanted that are not known yet."""
        return self.scores is not None and not self.scores.complete

    def choose(self, logits: Tensor, guess: Sequence[int] = ()) -> Choice:
        """Choose from ``logits`` [T, V] the next tokens, as if the T - 1 tokens of ``guess`` came true."""
        if len(guess) == 0:
            return Text.choose_each([self], logits)
        if self._matcher is not None:
            return self._choose_within(self._matcher, logits, guess)
        return choose_run(logits, self.sampling, len(self.ids), self._history, guess, self.num_logprobs)

    @staticmethod
    def choose_each(texts: Sequence[Text], logits: Tensor) -> Choice:
        """The next token of each text, from its row of ``logits`` [B, V]."""
        given = [(t.sampling, len(t.ids), t._history, t.num_logprobs, t._mask()) for t in texts]
        samplings, positions, histories, asked, masks = zip(*given, strict=True)
        return choose(logits, samplings, positions, histories, asked, masks)

    def chosen(self, choice: Choice) -> list[int]:
        """The tokens of ``choice`` on the host. Raises InputError where there was nothing to choose."""
        if self._matcher is not None and self._matcher.trouble is not None:
            raise InputError(f"the text cannot follow its structure any further: {self._matcher.trouble}")
        return choice.ids()

    def _mask(self) -> Tensor | None:
        if self._matcher is None:
            return None
        self._matcher.follow(self.generated)
        return self._matcher.mask()

    def _choose_within(self, matcher: Matcher, logits: Tensor, guess: Sequence[int]) -> Choice:
        """As far as guesses come true: what a structure allows after one that does not is no question."""
        history, choices = self._history, []
        length = 0 if history is None else len(history)
        try:
            for t in range(len(guess) + 1):
                matcher.follow([*self.generated, *guess[:t]])
                if t and matcher.complete:  # the text ends here
                    break
                mask, position = matcher.mask(), len(self.ids) + t
                one = choose(logits[t : t + 1], [self.sampling], [position], [history], [self.num_logprobs], [mask])
                choices.append(one)
                if t == len(guess) or int(one.tokens) != guess[t] or guess[t] in self.ending.ends:
                    break
                if history is not None:
                    history.append(guess[t])
        finally:
            if history is not None:
                history.rewind(length)
        return Choice(
            torch.cat([c.tokens for c in choices]),
            torch.cat([c.peaks for c in choices]),
            tuple(told for c in choices for told in c.logprobs),
        )

    def take(self, tokens: Sequence[int], logprobs: Sequence[Logprobs | None], guess: Sequence[int] = ()) -> None:
        """Add the first of ``tokens``, and of the others as many as follow a guess that came true, up to the text's
        end."""
        for i, token in enumerate(tokens):
            self._taken.append((token, logprobs[i]))
            if self.ending.reason is not None or i >= len(guess) or guess[i] != token:
                break

    def _completed(self, token: int) -> bool:
        """Whether the structure ends the text after ``token``, the last one."""
        if self._matcher is None or token in self._ending.ends:
            return False
        self._matcher.follow(self._generated)
        return self._matcher.complete

    def give_up(self) -> None:
        """The deadline is over."""
        self._given_up = True
        self._settle()

    def piece(self) -> Piece | None:
        """What has come since `tell` was last called; None where there is nothing to say, or it is held back."""
        tokens, characters, ended = self._told
        reason, said = self.ending.reason, self.shown[characters:]
        new = tokens < len(self.generated) or (reason is not None and not ended)
        if not new or not (said or self._silent or reason is not None):
            return None
        told = [told for _, told in self._taken[tokens:] if told is not None]
        return Piece(said, tuple(self.generated[tokens:]), reason, self.ending.matched, tuple(told))

    def tell(self) -> None:
        """What `piece` gives has been told."""
        if self.piece() is not None:
            self._told = (len(self.generated), len(self.shown), self.ending.reason is not None)


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
    structure: Structure | None = None,
    show_special_tokens: bool = False,
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
    if structure is not None and not isinstance(structure, Structure):
        raise InputError(f"structure is {structure!r:.80}; expected one such as Structure.json_schema(...), or None")
    require(isinstance(show_special_tokens, bool), "show_special_tokens", show_special_tokens, "True or False")
    ids = prompt_ids(model, prompt)
    limit = model.spec.max_length if limit is None else limit
    if len(ids) > limit:
        raise InputError(f"the prompt has {len(ids)} tokens; at most {limit} fit. Shorten it.")
    ends = end_token_ids(model) if stop_token_ids is None else stop_token_ids
    stopping = Stopping(max_tokens, ends, stop, include_stop, deadline)
    vocab_size = model.spec.vocab_size
    if stop_token_ids is not None and (wrong := [i for i in stopping.token_ids if not 0 <= i < vocab_size]):
        raise InputError(f"stop_token_ids name token {wrong[0]}; the vocabulary is 0 to {vocab_size - 1}")
    return Text(model, ids, stopping, sampling, logprobs, limit, structure, show_special_tokens)
