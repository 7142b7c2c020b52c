"""How probable a prompt's tokens are: what one forward pass without a cache says, however the prompt was fed."""

from __future__ import annotations

import pytest
import torch

from exactkv.cache.store import PromptStore
from exactkv.generation import Engine, Request, make_text
from exactkv.generation.scores import PromptScores
from exactkv.models.model import Model
from tests.generation.test_conversation import KINDS, chat_model
from tests.generation.tiny_text import VOCAB

MODELS = {kind: chat_model(kind) for kind in KINDS}


def added(engine: Engine, prompt: list[int], top: int = 3, salt: str = "") -> Request:
    text = make_text(engine.model, prompt, max_tokens=3, stop_token_ids=())
    text.scores = PromptScores(prompt, top)
    return engine.add(text, salt=salt)


def check(model: Model, request: Request) -> None:
    """Against one pass, log-probabilities and the ranks of the best."""
    prompt, scores = list(request.text.prompt), request.text.scores
    assert scores is not None and scores.complete and len(scores.told) == len(prompt) - 1
    if len(prompt) == 1:
        return
    logs = model([prompt])[0].double().log_softmax(-1)  # type: ignore[index]
    own = [float(logs[i, token]) for i, token in enumerate(prompt[1:])]
    assert [value for value, _ in scores.told] == pytest.approx(own, abs=1e-9)
    for i, (value, ranked) in enumerate(scores.told):
        best = logs[i].topk(scores.top).values.tolist() if scores.top else []
        assert [v for _, v in ranked] == pytest.approx(best, abs=1e-9)
        assert all(value == v for token, v in ranked if token == prompt[i + 1])


def prompts() -> list[list[int]]:
    return [[(7 * i + j * (i + 1)) % VOCAB for j in range(n)] for i, n in enumerate((1, 2, 40, 5, 23, 90))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step_tokens", [5, 64])
def test_scores_are_those_of_one_pass(kind: str, step_tokens: int) -> None:
    """Among others that are not scored, in pieces and several at once; and the replies are what they are without."""
    model = MODELS[kind]
    engine = Engine(model, max_rows=5, step_tokens=step_tokens)
    others = [engine.add(make_text(model, p, max_tokens=3, stop_token_ids=())) for p in prompts()]
    requests = [added(engine, p, top=i % 4) for i, p in enumerate(prompts())]
    list(engine.run())
    for other, request in zip(others, requests, strict=True):
        check(model, request)
        assert request.text.generated == other.text.generated


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_hides_nothing(kind: str) -> None:
    model = MODELS[kind]
    with PromptStore() as store:
        engine = Engine(model, store=store)
        for _ in range(2):
            request = added(engine, prompts()[5])
            list(engine.run())
            check(model, request)
            assert request.cached_tokens == 0 and request.fed_tokens == 90
        plain = engine.add(make_text(model, prompts()[5], max_tokens=3, stop_token_ids=()))
        list(engine.run())
        assert plain.cached_tokens == 89  # what a scored one computed is kept for others


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_gave_their_memory_back_go_on(kind: str) -> None:
    model = MODELS[kind]
    least = Engine(model)._most(100)
    engine = Engine(model, max_rows=4, step_tokens=8, max_bytes=int(1.3 * least))
    requests = [added(engine, p) for p in (prompts()[5], prompts()[4], prompts()[2])]
    list(engine.run())
    for request in requests:
        check(model, request)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_step_is_made_good(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Want of memory while log-probabilities are made: the cache stands further on than what is known."""
    model = MODELS[kind]
    engine = Engine(model, max_rows=3, step_tokens=16)
    requests = [added(engine, p) for p in (prompts()[5], prompts()[2])]
    take, calls = PromptScores.take, 0

    def failing(self: PromptScores, first: int, logits: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 6, 13):
            raise MemoryError
        take(self, first, logits)

    monkeypatch.setattr(PromptScores, "take", failing)
    failed = 0
    while engine.busy:
        try:
            engine.step()
        except MemoryError:
            failed += 1
        engine._cache.check_integrity()
        assert failed < 100
    assert failed >= 2
    for request in requests:
        check(model, request)


def test_what_is_cancelled_without_keeping_is_not_stored() -> None:
    model = MODELS[next(iter(KINDS))]
    with PromptStore() as store:
        engine = Engine(model, store=store)
        for keep in (False, True):
            request = engine.add(make_text(model, prompts()[2], max_tokens=9, stop_token_ids=()))
            engine.step()
            assert engine.cancel(request, keep=keep) and engine.rows == 0
            assert (store.stats().tokens > 0) == keep
