"""mlx-lm's own ways to generate, greedy. As `mlx_calls`: plain functions for scripts too."""

import copy
import importlib
import inspect
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import cache as kv
from mlx_lm.tokenizer_utils import TokenizerWrapper


class Request(NamedTuple):
    prompt: Any
    max_tokens: int
    stop: Any = ()


class Completion(NamedTuple):
    tokens: Any
    finish_reason: Any = None
    cache: Any = None
    prompt_tokens: Any = None
    completion_tokens: Any = None


class Ids(TokenizerWrapper):  # type: ignore[misc]
    """Stands in for a tokenizer: text is ids with spaces between. ``stops`` end a text."""

    def __init__(self, stops: Any = ()):
        object.__setattr__(self, "stops", set(stops))

    eos_token_ids = property(lambda self: self.stops)
    detokenizer = property(lambda self: self)
    last_segment = ""

    def decode(self, tokens: Any) -> str:
        return " ".join(map(str, tokens))

    def reset(self) -> None: ...

    def add_token(self, token: Any) -> None: ...

    def finalize(self) -> None: ...


def noised(model: Any, seed: int = 0) -> Any:
    """A draft model that agrees with ``model`` now and then."""
    draft = copy.deepcopy(model)
    random = np.random.default_rng(seed)
    weights = []
    for name, value in tree_flatten(draft.parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            own = np.array(value.astype(mx.float32))
            noise = 0.1 * own.std() * random.standard_normal(own.shape)
            weights.append((name, mx.array((own + noise).astype(np.float32)).astype(value.dtype)))
    draft.load_weights(weights, strict=False)
    mx.eval(draft.parameters())
    return draft


def received(stream: Any, close_after: Any) -> Any:
    """All that a stream yields, or as much as is taken before it is closed."""
    taken = []
    for item in stream:
        taken.append(item)
        if close_after is not None and len(taken) >= close_after:
            stream.close()
            break
    return taken


def one(model: Any, request: Any, close_after: Any = None, **options: Any) -> Any:
    """`generate_step` with a cache given, which it fills."""
    from mlx_lm.generate import generate_step

    cache = kv.make_prompt_cache(model)
    prompt = mx.array(list(request.prompt))
    stream = generate_step(prompt, model, max_tokens=request.max_tokens, prompt_cache=cache, **options)
    return Completion([int(token) for token, _ in received(stream, close_after)], cache=cache)


def drafted(model: Any, draft: Any, request: Any, close_after: Any = None) -> Any:
    """`speculative_generate_step`; of the caches given, the model's own."""
    from mlx_lm.generate import speculative_generate_step

    own = kv.make_prompt_cache(model)
    if not kv.can_trim_prompt_cache(own):
        raise NotImplementedError("speculative generation with caches that cannot be trimmed")
    cache = own + kv.make_prompt_cache(draft)
    stream = speculative_generate_step(
        mx.array(list(request.prompt)), model, draft, num_draft_tokens=3, max_tokens=request.max_tokens,
        prompt_cache=cache,
    )  # fmt: skip
    return Completion([int(token) for token, *_ in received(stream, close_after)], cache=cache[: len(own)])


def streamed(model: Any, request: Any, close_after: Any = None) -> Any:
    """`stream_generate`, with its counts and reasons."""
    from mlx_lm.generate import stream_generate

    cache = kv.make_prompt_cache(model)
    stream = stream_generate(
        model, Ids(request.stop), list(request.prompt), max_tokens=request.max_tokens, prompt_cache=cache
    )
    given = received(stream, close_after)
    last = given[-1]
    tokens = {r.generation_tokens: int(r.token) for r in given}  # older versions tell the last one twice
    return Completion(list(tokens.values()), last.finish_reason, cache, last.prompt_tokens, last.generation_tokens)


def stopping(requests: Any) -> Any:
    """Stop tokens by request for BatchGenerator: arguments of its making, and of insert."""
    module: Any = importlib.import_module("mlx_lm.generate")
    if hasattr(module, "StopSequences"):
        return {}, {"stop_sequences": [module.StopSequences([[t] for t in r.stop]) for r in requests]}
    if hasattr(module, "SequenceStateMachine"):
        edges = [{"normal": [((t,), None) for t in r.stop]} if r.stop else {} for r in requests]
        return {}, {"state_machines": [module.SequenceStateMachine(e, initial="normal") for e in edges]}
    if len({tuple(r.stop) for r in requests}) > 1:
        raise NotImplementedError("stop tokens of one request only")
    return {"stop_tokens": set(requests[0].stop)}, {}


def batched(model: Any, requests: Any) -> Any:
    """`BatchGenerator`: three rows at most, prompts in pieces of four, so that rows join and leave all the time."""
    try:
        from mlx_lm.generate import BatchGenerator
    except ImportError as error:
        raise NotImplementedError("BatchGenerator") from error
    made, inserted = stopping(requests)
    generator = BatchGenerator(model, completion_batch_size=3, prefill_batch_size=2, prefill_step_size=4, **made)
    ids = generator.insert([list(r.prompt) for r in requests], [r.max_tokens for r in requests], **inserted)
    tokens: Any = {uid: [] for uid in ids}
    ends: Any = {}
    step = getattr(generator, "next_generated", None) or generator.next
    while len(ends) < len(ids) and (responses := step()):
        for r in responses:
            tokens[r.uid].append(int(r.token))
            if r.finish_reason is not None:
                cache = getattr(r, "prompt_cache", None)
                ends[r.uid] = (r.finish_reason, cache() if callable(cache) else cache)
    generator.close()
    return [Completion(tokens[uid], *ends.get(uid, ())) for uid in ids]


def all_at_once(model: Any, requests: Any) -> Any:
    """`batch_generate`, which returns text: here ids."""
    try:
        from mlx_lm.generate import batch_generate
    except ImportError as error:
        raise NotImplementedError("batch_generate") from error
    names = inspect.signature(batch_generate).parameters
    options = {"return_prompt_caches": True} if "return_prompt_caches" in names else {}
    limits = [r.max_tokens for r in requests]
    done = batch_generate(model, Ids(), [list(r.prompt) for r in requests], max_tokens=limits, **options)
    caches = getattr(done, "caches", None) or [None] * len(limits)
    tokens = [[int(token) for token in text.split()] for text in done.texts]
    return [Completion(t, cache=c) for t, c in zip(tokens, caches, strict=True)]


def generate(model: Any, generator: str, requests: Any, close_after: Any = None) -> Any:
    """One `Completion` a request. Requests may be tuples of prompt, max_tokens and stop tokens."""
    requests = [Request(*r) if isinstance(r, tuple) else r for r in requests]
    if generator == "BatchGenerator":
        return batched(model, requests)
    if generator == "batch_generate":
        return all_at_once(model, requests)
    if generator.startswith("speculative"):
        draft = model if generator.endswith("same model") else noised(model)
        ways = [drafted(model, draft, r, None if i else close_after) for i, r in enumerate(requests)]
    elif generator == "stream_generate":
        ways = [streamed(model, r, None if i else close_after) for i, r in enumerate(requests)]
    else:
        options = {"prefill_step_size": 5} if "small" in generator else {}
        ways = [one(model, r, None if i else close_after, **options) for i, r in enumerate(requests)]
    return ways
