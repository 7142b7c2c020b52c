"""What is done with transformers, as plain functions that need nothing of exactkv.

Reproduction scripts show these functions' source, so each is as short as a careful user of the library would write
it. A cache is a dict: ``past`` (the library's cache), ``fed`` (tokens that we fed), ``mask`` (None, or the attention
mask [B, T] of a left-padded batch), ``recording`` (whether its past is recorded until the next `crop`).
"""

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, StaticCache


def build(config: Any, seed: int = 0, dtype: str = "float32", attention: Any = None) -> Any:
    """A random model: matrices of std 1.2 / sqrt(fan in), so that attention matters and logits are about 1 to 10;
    norms and state-space parameters as the library starts them, a little disturbed."""
    options = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**copy.deepcopy(config))
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **options)
    generator = torch.Generator().manual_seed(seed)
    linear = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    embedding = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    conv1d = {id(m.weight) for m in model.modules() if type(m).__name__ == "Conv1D"}  # GPT-2: [in, out]
    for name, w in model.named_parameters():
        noise = torch.randn(w.shape, generator=generator)
        stacked = w.ndim > 1 and ("expert" in name or "router" in name or name.endswith("gate.weight"))
        if id(w) in embedding:
            noise = 0.3 * noise
        elif id(w) in linear | conv1d or stacked:
            noise = 1.2 * noise / w.shape[-2 if id(w) in conv1d else -1] ** 0.5
        else:
            noise = w.data.float() + 0.1 * noise
        w.data = noise.to(w.dtype)
    model.tie_weights()
    if dtype == "float64":  # grouped matrix products are for narrower numbers
        model.set_experts_implementation("eager")
    return model.eval().requires_grad_(False)


def full(model: Any, rows: Any) -> Any:
    """One pass without a cache over rows of equal length: logits [B, T, V]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(row) for row in rows]), use_cache=False).logits.double().numpy()


def new_cache(model: Any, kind: Any = None, step: Any = None, max_length: Any = None) -> Any:
    """An empty cache. ``max_length``: of a static one."""
    if step is not None or (max_length is not None and kind != "static"):
        raise NotImplementedError("a cache of a given size")
    if kind == "static":
        past = StaticCache(config=model.config, max_cache_len=max_length or 1024)
    elif kind == "dynamic, no config":
        past = DynamicCache()
    elif kind == "made by the model":
        past = None
    elif kind in ("quanto 4 bit", "hqq 4 bit"):
        past = quantized(model, kind.split()[0])
    else:
        past = DynamicCache(config=model.config)
    return {"past": past, "fed": 0, "mask": None, "recording": False}


def quantized(model: Any, backend: str) -> Any:
    """Groups and residual so small that rows are quantized within a short text."""
    from transformers import QuantizedCache

    axis = 0 if backend == "quanto" else 1
    return QuantizedCache(
        backend, model.config, nbits=4, axis_key=axis, axis_value=axis, q_group_size=8, residual_length=8
    )


def feed(model: Any, cache: Any, tokens: Any, positions: bool = False) -> Any:
    """Tokens after what the cache holds: logits [n, V]."""
    return run(model, cache, tokens, positions).logits[0].double().numpy()


def run(model: Any, cache: Any, tokens: Any, positions: bool = False, **options: Any) -> Any:
    """One call of the model on one row; the cache goes on."""
    accepted = inspect.signature(model.forward).parameters
    name = next(n for n in ("past_key_values", "cache_params", "state") if n in accepted)
    options[name] = cache["past"]
    if cache["mask"] is not None:  # a row of a left-padded batch
        cache["mask"] = torch.cat([cache["mask"], torch.ones(1, len(tokens), dtype=torch.long)], dim=1)
        options["attention_mask"] = cache["mask"] if name == "past_key_values" else cache["mask"][:, -len(tokens) :]
    places = torch.arange(cache["fed"], cache["fed"] + len(tokens))
    if (positions or cache["mask"] is not None) and "position_ids" in accepted:
        options["position_ids"] = places[None]
    if positions and "cache_position" in accepted:
        options["cache_position"] = places
    if positions and not {"position_ids", "cache_position"} & set(options):
        raise NotImplementedError("positions named by the caller")
    with torch.no_grad():
        out = model(input_ids=torch.tensor([list(tokens)]), use_cache=True, **options)
    cache["past"] = out.get(name, cache["past"])
    cache["fed"] += len(tokens)
    if cache["recording"] == "one call":
        cache["past"].crop(0)
    return out


def length(model: Any, cache: Any) -> Any:
    """How many tokens the cache says it holds."""
    if cache["past"] is None:
        return 0
    try:
        held = int(cache["past"].get_seq_length())
    except (ValueError, AttributeError):  # nothing but recurrent layers
        raise NotImplementedError("the length of a cache without attention") from None
    return held if cache["mask"] is None else held - int((cache["mask"] == 0).sum())


def nbytes(model: Any, cache: Any) -> int:
    """Bytes of every memory block that tensors within the cache keep alive."""
    found, seen, left = {}, set(), [cache["past"]]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, (list, tuple, set)):
            left += value
        elif type(value).__module__.startswith("transformers.") and "config" not in type(value).__module__:
            left.append(getattr(value, "__dict__", None))
    found.pop(0, None)  # nothing allocated
    return sum(found.values())


def rewind(model: Any, cache: Any, count: int) -> Any:
    """Take back ``count`` tokens. `crop` returns nothing: where it does not raise, it has promised all of them."""
    length(model, cache)
    cache["past"].crop(-count)
    cache["fed"] -= count
    if cache["mask"] is not None:
        cache["mask"] = cache["mask"][:, : cache["mask"].shape[1] - count]
    return count


def rewindable(model: Any, kind: Any, count: int) -> Any:
    """A cache that records its past, so that windows can be rewound."""
    cache = new_cache(model, kind)
    cache["past"].activate_past_recording()
    cache["recording"] = True
    return cache


def settle(model: Any, cache: Any) -> None:
    """A round is over: drop what was recorded."""
    if cache["recording"] and cache["fed"]:
        cache["past"].crop(0)


def fork(model: Any, cache: Any) -> Any:
    return copy.deepcopy(cache)


def reset(model: Any, cache: Any) -> Any:
    cache["past"].reset()
    cache["fed"], cache["mask"] = 0, None
    return cache


# Batches: left padding, as `generate` does it.


def new_batch(model: Any, rows: int, kind: Any = None) -> Any:
    cache = new_cache(model, kind)
    cache["mask"] = torch.zeros(rows, 0, dtype=torch.long)
    return cache


def feed_batch(model: Any, batch: Any, rows: Any) -> Any:
    """The first call takes rows of different lengths, padded on the left; later ones rows of equal length."""
    lengths = [len(row) for row in rows]
    longest, first = max(lengths), batch["mask"].shape[1] == 0
    if len(set(lengths)) > 1 and not (first and min(lengths)):
        raise NotImplementedError("rows of different lengths after the first call, or empty ones")
    accepted = inspect.signature(model.forward).parameters
    name = next(n for n in ("past_key_values", "cache_params", "state") if n in accepted)
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    new = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    batch["mask"] = torch.cat([batch["mask"], new], dim=1)
    # As `generate` does it: models that only recur are told of padding where there can be some, in the first call.
    mask = batch["mask"] if name == "past_key_values" else new if first else None
    options: Any = {"attention_mask": mask, name: batch["past"]}
    if "position_ids" in accepted:
        options["position_ids"] = (batch["mask"].cumsum(-1) - 1).clamp(0)[:, -longest:]
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True, **options)
    batch["past"] = out.get(name, batch["past"])
    batch["fed"] += longest
    return [out.logits[i, longest - n :].double().numpy() for i, n in enumerate(lengths)]


def lengths(model: Any, batch: Any) -> Any:
    """What the cache says it holds, less each row's padding."""
    held = length(model, {**batch, "mask": None})
    return [held - int((row == 0).sum()) for row in batch["mask"]]


def select(model: Any, batch: Any, rows: Any) -> Any:
    """These rows in this order, by the library's means: dropping, repeating or reordering rows."""
    past, count = batch["past"], len(batch["mask"])
    rows = list(rows)
    times = len(rows) // count
    attention_only = all(hasattr(layer, "batch_select_indices") for layer in past.layers)
    if attention_only and times > 1 and rows == [i for i in range(count) for _ in range(times)]:
        past.batch_repeat_interleave(times)
    elif attention_only and len(rows) < count:
        past.batch_select_indices(torch.tensor(rows))
    else:
        past.reorder_cache(torch.tensor(rows))
    batch["mask"] = batch["mask"][rows]
    return batch


def extract(model: Any, batch: Any, row: int) -> Any:
    """One row of a copy, its padding still in front."""
    alone = select(model, copy.deepcopy(batch), [row])
    alone["fed"] = int(alone["mask"].sum())
    return alone


def rewind_batch(model: Any, batch: Any, counts: Any) -> Any:
    counts = list(counts)
    if len(set(counts)) > 1:
        raise NotImplementedError("rewinding rows by different numbers")
    batch["past"].crop(-counts[0])
    batch["mask"] = batch["mask"][:, : batch["mask"].shape[1] - counts[0]]
    return counts


# Generation, greedy.


def noised(model: Any) -> Any:
    """A draft model: a copy of other weights, so that some drafts are accepted and some are not."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for w in draft.parameters():
        w.data += (0.2 * w.data.float().std(unbiased=False) * torch.randn(w.shape, generator=generator)).to(w.dtype)
    return draft


def generate(model: Any, generator: str, requests: Any) -> Any:
    """What `generate` makes of each request's prompt. The model's own generation settings are set aside, since
    they may hold penalties and stop tokens."""
    options: Any = {
        "generate, static cache": {"cache_implementation": "static", "disable_compile": True},
        "generate, no cache": {"use_cache": False},
        "chunked prefill": {"prefill_chunk_size": 4},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
    }.get(generator, {})
    if generator == "continuous batching":
        return continuous(model, requests)
    drafts: Any = {}
    if generator.startswith("assisted"):
        if generator.endswith("same model"):  # drafts of four, however sure of itself the draft model is
            drafts["assistant_model"] = copy.deepcopy(model)
            long = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
        else:
            drafts["assistant_model"], long = noised(model), {}
        drafts["assistant_model"].generation_config = GenerationConfig(num_assistant_tokens=4, **long)
    if len({tuple(r.stop) for r in requests}) > 1:
        raise NotImplementedError("a stop token of one prompt of a batch alone")
    longest = max(len(r.prompt) for r in requests)
    ids = torch.tensor([[0] * (longest - len(r.prompt)) + list(r.prompt) for r in requests])
    mask = torch.tensor([[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in requests])
    stop = list(requests[0].stop)
    config = GenerationConfig(
        max_new_tokens=max(r.max_tokens for r in requests), do_sample=False, eos_token_id=stop or None,
        pad_token_id=0, return_dict_in_generate=True, **options,
    )  # fmt: skip
    own, model.generation_config = model.generation_config, GenerationConfig()
    model.__dict__.pop("_previous_max_cache_length", None)
    try:
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, generation_config=config, **drafts)
    finally:
        model.generation_config = own
    done = []
    for row, request in zip(out.sequences, requests, strict=True):
        tokens = row[longest:].tolist()
        done.append(
            SimpleNamespace(tokens=tokens if len(requests) == 1 else own_part(tokens, request, requests), cache=None)
        )
    past = out.get("past_key_values")
    if len(requests) == 1 and past is not None and "static" not in generator:
        recording = "one call" if any(getattr(layer, "record_past", False) for layer in past.layers) else False
        done[0].cache = {"past": past, "fed": 0, "mask": None, "recording": recording}
        try:
            done[0].cache["fed"] = length(model, done[0].cache)
        except NotImplementedError:
            done[0].cache = None
    return done


def continuous(model: Any, requests: Any) -> Any:
    """Continuous batching over paged memory, on a copy of the model, since its attention is exchanged meanwhile."""
    from transformers import ContinuousBatchingConfig

    model = copy.deepcopy(model)
    model.generation_config = GenerationConfig()
    config = GenerationConfig(max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=-1)
    memory = ContinuousBatchingConfig(block_size=4, num_blocks=128, max_batch_tokens=32)
    found: Any = {}
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=memory
    ) as manager:
        for i, r in enumerate(requests):
            manager.add_request(
                list(r.prompt), request_id=str(i), max_new_tokens=r.max_tokens, eos_token_id=list(r.stop) or None
            )
        while len(found) < len(requests):
            result = manager.get_result(timeout=20)
            if result is None or result.error:
                raise RuntimeError(f"no result came: {result and result.error}")
            if result.is_finished():
                found[int(result.request_id)] = list(result.generated_tokens)
    return [SimpleNamespace(tokens=found[i], cache=None) for i in range(len(requests))]


def own_part(tokens: Any, request: Any, requests: Any) -> Any:
    """A row's own tokens in a batch, which has one limit for all, and padding after a row's stop token. Where it is
    longer than that limit, or goes on after a stop, it is left as it is, to be seen."""
    ends = [i for i, token in enumerate(tokens[: request.max_tokens]) if token in request.stop]
    if len(tokens) > max(r.max_tokens for r in requests):
        return tokens
    if ends:
        return tokens if any(tokens[ends[0] + 1 :]) else tokens[: ends[0] + 1]
    return tokens[: request.max_tokens]
