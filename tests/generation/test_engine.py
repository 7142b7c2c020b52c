"""Many texts at once: each is what it is alone, for every kind of layer, whatever joins, leaves or is cancelled."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactkv.cache.store import PromptStore
from exactkv.errors import InputError
from exactkv.generation import Engine, Sampling, Text, generate, generate_each, make_text, stream
from exactkv.generation.draft import ModelDraft, PromptLookup
from exactkv.models.model import Model
from tests.generation.test_conversation import KINDS, chat_model
from tests.generation.tiny_text import VOCAB

MODELS = {kind: chat_model(kind) for kind in KINDS}


class Wrong:
    """A draft that is never right, or right for a while: the worst that can be checked."""

    def __init__(self, truth: list[int] = (), right: int = 0):
        self.truth, self.right = list(truth), right

    def propose(self, tokens: Any, most: int) -> list[int]:
        done = len(tokens)
        guess = self.truth[done : done + most]
        guess += [0] * (most - len(guess))
        return [t if i < self.right else (t + 1) % VOCAB for i, t in enumerate(guess)]


def alone(model: Model, prompt: list[int], **options: Any) -> list[int]:
    return [*(g := stream(model, prompt, **options)), g.tokens][-1]  # type: ignore[list-item,return-value]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    repeated = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    prompt = (repeated * draw(st.integers(1, 8)))[: draw(st.integers(1, 40))]
    sampled = draw(st.sampled_from(["greedy", "sampled", "penalised"]))
    sampling = {
        "greedy": Sampling(),
        "sampled": Sampling(temperature=0.8, top_p=0.9, seed=draw(st.integers(0, 5))),
        "penalised": Sampling(temperature=0.5, repetition_penalty=1.3, seed=1),
    }[sampled]
    stops = draw(st.sampled_from([(), tuple(range(0, VOCAB, 7))]))
    return {
        "prompt": prompt, "max_tokens": draw(st.integers(1, 20)), "sampling": sampling, "stop_token_ids": stops,
        "draft": draw(st.sampled_from([None, "lookup", "wrong", "half"])), "at": draw(st.integers(0, 12)),
        "cancelled": draw(st.sampled_from([None, None, None, 1, 4])),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(
    given_requests=st.lists(requests(), min_size=1, max_size=7),
    max_rows=st.integers(1, 5),
    spare=st.integers(0, 30),
    tight=st.booleans(),
)
def test_each_row_is_what_it_is_alone(
    kind: str, given_requests: list[dict[str, Any]], max_rows: int, spare: int, tight: bool
) -> None:
    model = MODELS[kind]
    settings_of = lambda r: {k: r[k] for k in ("max_tokens", "sampling", "stop_token_ids")}  # noqa: E731
    expected = [alone(model, r["prompt"], **settings_of(r)) for r in given_requests]
    limit = None
    if tight:
        limit = int(1.5 * Engine(model, draft_tokens=12)._most(60))
    engine = Engine(model, max_rows, max_rows + spare, max_bytes=limit, draft_tokens=12)
    under_way: dict[int, Any] = {}
    said: dict[int, list[int]] = {}
    step = 0
    while engine.busy or len(under_way) < len(given_requests):
        for i, r in enumerate(given_requests):
            if i not in under_way and r["at"] <= step:
                whole = [*r["prompt"], *expected[i]]
                drafts = {None: None, "lookup": PromptLookup(), "wrong": Wrong(whole), "half": Wrong(whole, 2)}
                under_way[i] = engine.add(make_text(model, r["prompt"], **settings_of(r)), drafts[r["draft"]])
                said[under_way[i].number] = []
        for update in engine.step():
            assert update.error is None and update.piece is not None
            said[update.request.number] += update.piece.tokens
        assert limit is None or engine.nbytes <= limit
        assert engine.rows <= max_rows
        step += 1
        for i, r in enumerate(given_requests):
            if r["cancelled"] == step and i in under_way and not under_way[i].finished:
                assert engine.cancel(under_way[i]) and not engine.cancel(under_way[i])
        engine._cache.check_integrity()
        assert step < 2000
    for i, r in enumerate(given_requests):
        made = under_way[i].text.generated
        if r["cancelled"] is None:
            assert made == expected[i] == said[under_way[i].number]
            stats = under_way[i].stats
            assert stats.generated_tokens == len(made) and stats.accepted_tokens <= stats.drafted_tokens
            if not under_way[i].preemptions:
                assert stats.prompt_tokens == stats.cached_tokens + stats.fed_tokens
        else:
            assert made == expected[i][: len(made)]
    assert engine.nbytes == 0 or not engine.busy


@pytest.mark.parametrize("kind", KINDS)
def test_rows_preempted_go_on_where_they_were(kind: str) -> None:
    model = MODELS[kind]
    prompts = [[(i * 7 + j) % VOCAB for j in range(30)] for i in range(4)]
    expected = [alone(model, p, max_tokens=150, stop_token_ids=()) for p in prompts]
    engine = Engine(model, max_rows=4)
    limit = 3 * engine._most(100)
    engine = Engine(model, max_rows=4, max_bytes=max(limit, engine._most(180)))
    made = [engine.add(make_text(model, p, max_tokens=150, stop_token_ids=())) for p in prompts]
    most = 0
    for _ in iter(lambda: engine.busy and engine.step(), False):
        most = max(most, engine.nbytes)
    assert [r.text.generated for r in made] == expected
    assert 0 < most <= (engine.max_bytes or 0)
    if kind == "full":
        assert engine.preemptions > 0


def test_what_can_never_fit_is_refused_and_nothing_is_lost() -> None:
    model = MODELS["full"]
    engine = Engine(model, max_bytes=Engine(model)._most(300))
    kept = engine.add(make_text(model, [1, 2, 3], max_tokens=4))
    with pytest.raises(InputError, match="max_bytes is"):
        engine.add(make_text(model, [1, 2, 3], max_tokens=4000))
    list(engine.run())
    assert kept.text.generated == alone(model, [1, 2, 3], max_tokens=4)
    for wrong in ({"max_rows": 0}, {"step_tokens": 3}, {"max_bytes": 0}, {"draft_tokens": -1}, {"max_rows": True}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Engine(model, **wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "where", ["Text.take", "Text.choose_each", "Engine._take", "Engine._sort", "Engine._free", "Model"]
)
def test_interrupted_anywhere_it_goes_on(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or after any call of these: nothing is said twice, and nothing is lost, of rows that end then too."""
    model = MODELS[kind]
    prompts = [[1, 2, 3] * 5, [9, 8] * 4, [5] * 9, [7]]
    lengths = [12, 1, 7, 2]
    expected = [alone(model, p, max_tokens=n, stop_token_ids=()) for p, n in zip(prompts, lengths, strict=True)]
    owner, name = {
        "Text.take": (Text, "take"), "Text.choose_each": (Text, "choose_each"), "Engine._take": (Engine, "_take"),
        "Engine._sort": (Engine, "_sort"), "Engine._free": (Engine, "_free"), "Model": (type(model), "__call__"),
    }[where]  # fmt: skip
    inner = getattr(owner, name)
    for at in range(1, 12):
        for after in (False, True):
            calls = 0

            def interrupted(*given: Any, at: int = at, after: bool = after, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at and not after:
                    raise KeyboardInterrupt
                result = inner(*given, **options)
                if calls == at:
                    raise KeyboardInterrupt
                return result

            with monkeypatch.context() as patch:
                wrapped = staticmethod(interrupted) if name == "choose_each" else interrupted
                patch.setattr(owner, name, wrapped)
                engine = Engine(model, max_rows=3, draft_tokens=4)
                said: dict[int, list[int]] = {}
                pairs = zip(prompts, lengths, strict=True)
                made = [
                    engine.add(make_text(model, p, max_tokens=n, stop_token_ids=()), PromptLookup()) for p, n in pairs
                ]
                for _ in range(200):
                    try:
                        for update in engine.step():
                            assert update.piece is not None
                            said.setdefault(update.request.number, []).extend(update.piece.tokens)
                    except KeyboardInterrupt:
                        continue
                    if not engine.busy:
                        break
            assert not engine.busy and [r.text.generated for r in made] == expected
            assert [said[r.number] for r in made] == expected and all(r.finished for r in made)


def test_a_row_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["full"]
    expected = alone(model, [4, 5, 6], max_tokens=9, stop_token_ids=())
    call = type(model).__call__

    def spoiled(self: Any, tokens: Any, **options: Any) -> torch.Tensor | None:
        out = call(self, tokens, **options)
        if out is not None and len(tokens) == 2 and options["cache"].lengths[1] == 8:
            out[1] = torch.nan
        return out

    monkeypatch.setattr(type(model), "__call__", spoiled)
    results = generate(model, [[4, 5, 6], [1, 2, 3, 4]], max_tokens=9, stop_token_ids=())
    assert list(results[0].tokens) == expected and results[0].error is None
    assert "NaN" in str(results[1].error) and len(results[1].tokens) < 9


def test_deadlines_end_those_that_wait_too() -> None:
    model = MODELS["full"]
    engine = Engine(model, max_rows=1)
    first = engine.add(make_text(model, [1, 2], max_tokens=3, stop_token_ids=()))
    late = engine.add(make_text(model, [1, 2], max_tokens=3, deadline=1e-6))
    time.sleep(0.01)
    updates = list(engine.run())
    assert [u.piece.finish_reason for u in updates if u.request is late and u.piece] == ["deadline"]
    assert late.text.generated == [] and len(first.text.generated) == 3 and late.finished


def test_results_in_order_of_prompts_and_each_as_it_ends() -> None:
    model = MODELS["sliding"]
    prompts: list[Any] = [
        [1, 2, 3], {"prompt": [4, 5], "max_tokens": 2}, "text", {"prompt": []}, {"promt": [1]}, None, [6],
    ]  # fmt: skip
    each = list(generate_each(model, iter(prompts), max_tokens=6, stop_token_ids=(), max_rows=2))
    assert sorted(r.index for r in each) == list(range(7))
    by_index = {r.index: r for r in each}
    assert "the prompt is 'None'" in str(by_index[5].error) and len(by_index[6].tokens) == 6
    assert "empty" in str(by_index[3].error) and "promt" in str(by_index[4].error)
    assert len(by_index[0].tokens) == 6 and len(by_index[1].tokens) == 2 and by_index[1].finish_reason == "length"
    assert by_index[2].text == "".join(p.text for p in stream(model, "text", max_tokens=6, stop_token_ids=()))
    with pytest.raises(InputError, match="prompt 1"):
        generate(model, [[1], []])
    assert generate(model, []) == []
    both = generate(model, [[1], {"prompt": [2], "max_tokens": 1}], max_tokens=3, stop_token_ids=())
    assert [len(c.tokens) for c in both] == [3, 1] and both[0].usage.prompt_tokens == 1  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"prompt 0: max_tokens is 0"):
        generate(model, [[1]], max_tokens=0)
    with pytest.raises(InputError, match=r"prompt 0: a prompt has max_token; expected prompt, max_tokens"):
        generate(model, [[1]], max_token=3)
    assert [c.index for c in generate_each(model, "hello", max_tokens=1)] == [0]
    assert len(generate(model, {"prompt": [1, 2]}, max_tokens=1)) == 1  # type: ignore[arg-type]
    with pytest.raises(InputError, match="prompts are 3"):
        generate(model, 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="prompt 1: a prompt of 3000 tokens .* may take"):
        generate(model, [[1], [1] * 3000], max_tokens=5, max_bytes=Engine(model)._most(100))
    with pytest.raises(InputError, match="draft"):
        generate(model, [[1]], draft=PromptLookup())  # type: ignore[arg-type]


def test_prompts_are_taken_only_when_there_is_room() -> None:
    model, taken = MODELS["full"], []

    def prompts() -> Any:
        for i in range(50):
            taken.append(i)
            yield [i % VOCAB + 1, 2]

    results = generate_each(model, prompts(), max_tokens=3, stop_token_ids=(), max_rows=2)
    next(results)
    assert len(taken) <= 4
    assert len(list(results)) == 49


def test_a_text_that_begins_and_ends_in_one_step_is_one_result() -> None:
    """Its first token comes with its prompt, its last in the same step, while others go on."""
    model = MODELS["full"]
    prompts = [{"prompt": [5, 6], "max_tokens": n, "stop_token_ids": ()} for n in (2, 9, 1, 2, 3)]
    found = list(generate_each(model, prompts, max_rows=2))
    assert sorted((r.index, len(r.tokens)) for r in found) == [(0, 2), (1, 9), (2, 1), (3, 2), (4, 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_store_prompts_are_fed_once_and_bytes_hold(kind: str) -> None:
    model = MODELS[kind]
    common = [(3 * i + 1) % VOCAB for i in range(60)]
    prompts = [[*common, i, i + 1] for i in range(4)] * 2
    expected = [alone(model, p, max_tokens=30, stop_token_ids=()) for p in prompts]
    with PromptStore() as store:
        limit = 2 * Engine(model, store=store, draft_tokens=12)._most(130)
        engine = Engine(model, max_rows=3, store=store, max_bytes=limit, draft_tokens=12)
        made = [engine.add(make_text(model, p, max_tokens=30, stop_token_ids=()), PromptLookup()) for p in prompts]
        while engine.busy:
            engine.step()
            assert engine.nbytes <= (engine.max_bytes or 0)
        assert [r.text.generated for r in made] == expected
        again = engine.add(make_text(model, prompts[0], max_tokens=30, stop_token_ids=()))
        other = engine.add(make_text(model, prompts[0], max_tokens=30, stop_token_ids=()), salt="another")
        list(engine.run())
        assert again.text.generated == other.text.generated == expected[0]
        assert again.fed_tokens == 1 and other.cached_tokens == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_among_others_where_bytes_are_tight(kind: str) -> None:
    """A request with a draft neither changes what others may take nor holds them up."""
    model = MODELS[kind]
    limit = Engine(model, draft_tokens=12)._most(100)
    engine = Engine(model, 4, step_tokens=16, max_bytes=limit, draft_tokens=12)
    long = [(i * 7) % VOCAB for i in range(80)]
    made = [engine.add(make_text(model, long, max_tokens=10, stop_token_ids=()))]
    made.append(engine.add(make_text(model, [1, 2], max_tokens=2, stop_token_ids=()), PromptLookup()))
    with pytest.raises(InputError, match="max_bytes is"):
        engine.add(make_text(model, long, max_tokens=4000), PromptLookup()) if kind != "mamba2" else engine.add(
            make_text(model, long), ModelDraft(MODELS["full"])
        )
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        assert steps < 100 and engine.nbytes <= limit
    assert made[0].text.generated == alone(model, long, max_tokens=10, stop_token_ids=())
    with pytest.raises(InputError, match="checks none"):
        Engine(model).add(make_text(model, [1]), PromptLookup())


class Broken:
    def __init__(self, given: Any):
        self.given = given

    def propose(self, tokens: Any, most: int) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.mark.parametrize("given", [None, 3, [1.5], ["a"], [VOCAB], [-1], ValueError("no")], ids=str)
def test_a_draft_that_fails_ends_its_own_row_only(given: Any) -> None:
    model = MODELS["hybrid"]
    engine = Engine(model, draft_tokens=4)
    bad = engine.add(make_text(model, [1, 2, 3], max_tokens=9, stop_token_ids=()), Broken(given))
    good = engine.add(make_text(model, [4, 5], max_tokens=9, stop_token_ids=()))
    errors = [update.error for update in engine.run() if update.error is not None]
    assert len(errors) == 1 and "the draft Broken" in str(errors[0]) and bad.error is errors[0] and bad.finished
    assert good.text.generated == alone(model, [4, 5], max_tokens=9, stop_token_ids=())
    with pytest.raises(InputError, match="the draft Broken"):
        list(stream(model, [1, 2, 3], 9, stop_token_ids=(), draft=Broken(given)))


def test_draft_models_are_counted_and_give_their_memory_back() -> None:
    model, small = MODELS["mamba2"], MODELS["full"]
    limit = int(2.5 * Engine(model, draft_tokens=6)._most(200, ModelDraft(small)))
    engine = Engine(model, max_rows=4, max_bytes=limit, draft_tokens=6)
    prompts = [[i, 2 * i + 1] * 20 for i in range(5)]
    made = [engine.add(make_text(model, p, max_tokens=60, stop_token_ids=()), ModelDraft(small)) for p in prompts]
    most = 0
    while engine.busy:
        engine.step()
        held = engine.nbytes
        drafts = sum(r.draft.nbytes for r in made if isinstance(r.draft, ModelDraft))
        assert held <= limit and drafts <= held
        most = max(most, drafts)
    assert most > 0 and [r.text.generated for r in made] == [
        alone(model, p, max_tokens=60, stop_token_ids=()) for p in prompts
    ]
