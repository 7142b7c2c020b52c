"""The `openai` package against a real server: what comes is what `exactkv.generate` gives with the same seed."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from exactkv.generation import Completion, Sampling, generate
from exactkv.models.model import Model
from tests.generation.test_conversation import KINDS, chat_model
from tests.serve.conftest import NAME, Running, until

HELLO = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "presence_penalty": 0.5, "logit_bias": {"65": 2.0}}


def sampling(**changes: Any) -> Sampling:
    given = {**SAMPLED, **changes}
    return Sampling(**{**given, "logit_bias": {65: 2.0}})


def plain(model: Model, prompt: Any, **options: Any) -> Completion:
    (done,) = generate(model, [prompt], **options)
    return done


def test_chat_is_generates(running: Running, model: Model) -> None:
    expected = plain(model, {"prompt": HELLO}, max_tokens=40, sampling=sampling(), logprobs=3)
    got = running.openai().chat.completions.create(
        model=NAME, messages=HELLO, max_tokens=40, logprobs=True, top_logprobs=3, **SAMPLED
    )
    (choice,) = got.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert got.usage.completion_tokens == len(expected.tokens)
    assert got.usage.prompt_tokens == expected.usage.prompt_tokens
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    told = choice.logprobs.content
    assert [t.logprob for t in told] == pytest.approx([at.logprob for at in expected.logprobs], abs=1e-9)
    assert [len(t.top_logprobs) for t in told] == [3] * len(expected.tokens)
    said = b"".join(bytes(t.bytes) for t, token in zip(told, expected.tokens, strict=True) if token < 256)
    assert said.decode(errors="replace") == expected.text


def test_a_stream_says_the_same(running: Running, model: Model) -> None:
    expected = plain(model, {"prompt": HELLO}, max_tokens=40, sampling=sampling(), logprobs=1)
    stream = running.openai().chat.completions.create(
        model=NAME, messages=HELLO, max_completion_tokens=40, stream=True, stream_options={"include_usage": True},
        logprobs=True, top_logprobs=1, **SAMPLED,
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    told = [t.logprob for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert text == expected.text and reasons[-1] == expected.finish_reason and set(reasons[:-1]) == {None}
    assert told == pytest.approx([at.logprob for at in expected.logprobs], abs=1e-9)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(expected.tokens)
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks[:-1])


def test_choices_have_seeds_in_a_row(running: Running, model: Model) -> None:
    got = running.openai().chat.completions.create(model=NAME, messages=HELLO, max_tokens=12, n=3, **SAMPLED)
    for i, choice in enumerate(got.choices):
        expected = plain(model, {"prompt": HELLO}, max_tokens=12, sampling=sampling(seed=7 + i))
        assert (choice.index, choice.message.content) == (i, expected.text)
    assert got.usage.prompt_tokens == expected.usage.prompt_tokens and got.usage.completion_tokens <= 36
    stream = running.openai().chat.completions.create(
        model=NAME, messages=HELLO, max_tokens=12, n=3, stream=True, **SAMPLED
    )
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in got.choices]


def test_without_a_seed_replies_differ(running: Running) -> None:
    made = [
        running.openai().chat.completions.create(model=NAME, messages=HELLO, max_tokens=30, temperature=1.5)
        for _ in range(2)
    ]
    assert made[0].choices[0].message.content != made[1].choices[0].message.content


def test_stop_ends_before_the_string(running: Running, model: Model) -> None:
    whole = plain(model, "abc", max_tokens=60, sampling=Sampling(temperature=1, seed=3), stop_token_ids=()).text
    end = next(whole[i : i + 2] for i in range(3, len(whole)) if whole.index(whole[i : i + 2]) == i)
    for stop in (end, [end, "never said at all"]):
        got = running.openai().completions.create(
            model=NAME, prompt="abc", max_tokens=60, seed=3, stop=stop, extra_body={"ignore_eos": True}
        )
        assert got.choices[0].text == whole[: whole.index(end)] and got.choices[0].finish_reason == "stop"


def test_many_at_once_say_what_each_says_alone(running: Running, model: Model) -> None:
    """16 clients, some of them twice, with prompts that share beginnings, streaming and not."""

    def ask(i: int) -> tuple[str, str]:
        messages = [{"role": "user", "content": "Tell me of the number " + str(i % 5) * (i % 7 + 1)}]
        given = {"temperature": 0.5 + i / 16, "seed": i}
        expected = plain(model, {"prompt": messages}, max_tokens=20 + i, sampling=Sampling(**given)).text
        create = running.openai().chat.completions.create
        if i % 2:
            got = create(model=NAME, messages=messages, max_tokens=20 + i, **given).choices[0].message.content
        else:
            stream = create(model=NAME, messages=messages, max_tokens=20 + i, stream=True, **given)
            got = "".join(c.choices[0].delta.content or "" for c in stream)
        return got, expected

    with ThreadPoolExecutor(16) as pool:
        for got, expected in pool.map(ask, [*range(16), *range(5)]):
            assert got == expected
    until(running.idle)


def test_a_prompt_that_comes_again_is_cached(running: Running) -> None:
    messages = [{"role": "user", "content": "This was never asked before, and is now asked twice."}]
    first, second = (
        running.openai().chat.completions.create(model=NAME, messages=messages, max_tokens=4, temperature=0)
        for _ in range(2)
    )
    assert first.usage.prompt_tokens_details.cached_tokens < 10
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1
    assert first.choices[0].message.content == second.choices[0].message.content


def test_completions_of_texts_and_tokens(running: Running, model: Model) -> None:
    create = running.openai().completions.create
    ids = model.tokenizer.encode("abc")
    for prompt in ("abc", ids, ["abc", "de"], [ids, [1, 2, 3]]):
        got = create(model=NAME, prompt=prompt, max_tokens=9, temperature=0)
        prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        expected = generate(model, prompts, max_tokens=9)
        assert [c.text for c in got.choices] == [e.text for e in expected]
        assert [c.index for c in got.choices] == list(range(len(prompts)))
        assert got.usage.prompt_tokens == sum(e.usage.prompt_tokens for e in expected)
    many = create(model=NAME, prompt=["abc", "de"], max_tokens=9, temperature=0.7, seed=5, n=2)
    samplings = [Sampling(temperature=0.7, seed=seed) for seed in (5, 6)]
    expected = [plain(model, p, max_tokens=9, sampling=s) for p in ("abc", "de") for s in samplings]
    assert [c.text for c in many.choices] == [e.text for e in expected]
    assert many.usage.prompt_tokens == len("abcde") + 2  # each with its bos, once


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_tells_how_probable_the_prompt_was(running: Running, model: Model, max_tokens: int, stream: bool) -> None:
    """As lm-eval's local-completions asks; against one forward pass without a cache. Twice: the cache hides nothing."""
    prompt = model.tokenizer.encode("How probable is all of this, tökens of parts of characters too?")
    logs = model([prompt])[0].log_softmax(-1)
    for _ in range(2):
        got = running.openai().completions.create(
            model=NAME, prompt=[prompt, prompt[:1]], max_tokens=max_tokens, echo=True, logprobs=2, temperature=0,
            stream=stream,
        )  # fmt: skip
        chunks = [c.choices[0] for c in got if c.choices] if stream else got.choices
        for i, ids in enumerate((prompt, prompt[:1])):
            of = [c for c in chunks if c.index == i]
            told = [v for c in of if c.logprobs for v in c.logprobs.token_logprobs]
            top = [v for c in of if c.logprobs for v in c.logprobs.top_logprobs]
            tokens = [v for c in of if c.logprobs for v in c.logprobs.tokens]
            assert told[0] is None and top[0] is None
            expected = [float(logs[p, t]) for p, t in enumerate(ids[1:])]
            assert told[1 : len(ids)] == pytest.approx(expected, abs=1e-9)
            for p, best in enumerate(top[1 : len(ids)]):
                assert 2 <= len(best) <= 3 and max(best.values()) == pytest.approx(float(logs[p].max()), abs=1e-9)
            made = len(told) - len(ids)
            assert 0 <= made <= max_tokens and len(tokens) == len(told) == len(top)
            text = "".join(c.text for c in of)
            assert text.startswith(model.tokenizer.decode(ids, skip_special_tokens=False))
            assert of[-1].finish_reason in ("length", "stop")
        if not stream:
            assert got.usage.completion_tokens == 0 if max_tokens == 0 else got.usage.completion_tokens > 0


def test_tokenize_and_back(running: Running, model: Model) -> None:
    told = running.post("/tokenize", {"prompt": "Grüße", "return_token_strs": True}).json()
    assert told["tokens"] == model.tokenizer.encode("Grüße") and told["count"] == len(told["tokens"])
    assert told["token_strs"][0] == "<bos>" and told["token_strs"][3] == "bytes:\\xc3"
    back = running.post("/detokenize", {"tokens": told["tokens"][1:]}).json()
    assert back["prompt"] == "Grüße"
    chat = running.post("/tokenize", {"messages": HELLO}).json()
    assert chat["tokens"] == model.tokenizer.apply_chat_template(HELLO)


def test_models(running: Running) -> None:
    models = running.openai().models
    assert [m.id for m in models.list()] == [NAME] and models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o' here; there is: tiny"):
        running.openai().chat.completions.create(model="gpt-4o", messages=HELLO)


def test_responses(running: Running, model: Model) -> None:
    client = running.openai()
    given = {"temperature": 0.9, "top_p": 0.95}
    expected = plain(model, {"prompt": HELLO}, max_tokens=30, sampling=Sampling(seed=7, **given))
    asked = {
        "model": NAME, "instructions": "Be kind.", "max_output_tokens": 30, "extra_body": {"seed": 7}, **given,
    }  # fmt: skip
    inputs: list[Any] = ["Hello", [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]]
    for given_input in inputs:
        got = client.responses.create(input=given_input, **asked)
        status = {"length": "incomplete", "stop": "completed"}[expected.finish_reason]
        assert got.output_text == expected.text and got.status == status
        assert got.usage.output_tokens == len(expected.tokens)
    with client.responses.stream(input="Hello", **asked) as stream:
        events = list(stream)
        final = stream.get_final_response() if status == "completed" else None
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == expected.text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].type == f"response.{status}"
    assert (final or events[-1].response).output_text == expected.text
    more = client.responses.create(
        model=NAME, input=[*got.output, {"role": "user", "content": "More"}], max_output_tokens=3
    )
    assert more.usage.input_tokens > got.usage.output_tokens


def test_errors_are_the_packages_own(running: Running) -> None:
    client = running.openai()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x" * 3000}])
    assert caught.value.code == "context_length_exceeded" and "at most 2048 fit" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=NAME, messages=HELLO, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="keep_alive is a field that this server does not know"):
        client.chat.completions.create(model=NAME, messages=HELLO, extra_body={"keep_alive": 5})
    with pytest.raises(openai.NotFoundError, match="there is nothing at /v1/embeddings"):
        client.embeddings.create(model=NAME, input="x")


@pytest.mark.parametrize("kind", KINDS)
def test_timings_tell_what_the_cache_held(start: Callable[..., Running], kind: str) -> None:
    """What is told is what a cache of that length says of itself."""
    model = chat_model(kind)
    server = start(model_=model)
    body = {"model": NAME, "messages": HELLO, "max_tokens": 9, "ignore_eos": True, "timings": True}
    (told,) = server.post("/v1/chat/completions", body).json()["timings"]
    held = told["prompt_tokens"] + 8
    assert told["generated_tokens"] == 9 and told["fed_tokens"] + told["cached_tokens"] == told["prompt_tokens"]
    assert told["first_token_seconds"] > 0 and told["tokens_per_second"] > 0
    cache = model.new_cache()
    model([[1] * held], cache=cache, logits="none")
    shown = [(s["kind"], s["layers"], f"{s['start']}..{s['end']}") for s in told["cache"] if s["kind"] != "recurrent"]
    assert len(shown) == sum("positions" in line for line in repr(cache).splitlines())
    for name, layers, span in shown:
        assert re.search(rf"{name} +{layers} layers? +positions {re.escape(span)} ", repr(cache)), repr(cache)
    recurrent = [s for s in told["cache"] if s["kind"] == "recurrent"]
    assert [s["end"] for s in recurrent] == [held] * len(recurrent) and len(recurrent) == ("recurrent" in repr(cache))
    text = server.post("/v1/chat/completions", {**body, "stream": True}).text
    assert '"timings":[{"prompt_tokens"' in text.split("data: ")[-2]
