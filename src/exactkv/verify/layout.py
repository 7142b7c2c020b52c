"""Which layer of a decoder is of which kind, read from a Hugging Face config (a plain dict) alone.

Configs say it in three ways, often in two of them at once: lists with an entry a layer, lists of layer indices,
and rules such as "every fourth layer". A layout makes one of them, so that layers can be compared and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from exactkv.verify.target import Layer

Config = dict[str, Any]

INDEX_LISTS = ("moe_layers", "mlp_only_layers", "full_attn_idxs", "attn_layer_indices", "hybrid_layer_ids")
"""Fields that list the indices of layers."""
CYCLES = ("block_types", "sliding_window_pattern")
"""Fields that are repeated until every layer has an entry, where they are lists or strings."""
NOT_BY_LAYER = ("eos_token_id", "architectures", "time_step_limit", "ssm_multipliers", "mlp_multipliers")
"""Lists whose length says nothing of layers."""
DEFAULT_RULES: dict[str, Config] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {"sliding_window_pattern": 6},
    "cohere2": {"sliding_window_pattern": 4},
    "llama4_text": {"no_rope_layer_interval": 4},
    "smollm3": {"no_rope_layer_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
}
"""What these families do where neither a list nor a rule is given."""


def layer_count(config: Config) -> int:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if config.get(name):
            return int(config[name])
    for value in (config.get("layer_types"), config.get("layers_block_type"), config.get("hybrid_override_pattern")):
        if value:
            return len(value)
    return 0


def with_default_rules(config: Config) -> Config:
    """The config with its family's rule spelled out, if it gives none itself."""
    rules = DEFAULT_RULES.get(str(config.get("model_type")), {})
    if config.get("layer_types") or config.get("no_rope_layers") or config.get("_sliding_window_pattern"):
        return dict(config)
    return {**rules, **{k: v for k, v in config.items() if v is not None or k not in rules}}


def every(name: str) -> Callable[[Config, int, int], Any]:
    """Every n-th layer, the n-th first."""

    def rule(config: Config, i: int, count: int) -> Any:
        return (i + 1) % config[name] == 0

    return rule


def periodic(name: str) -> Callable[[Config, int, int], Any]:
    def rule(config: Config, i: int, count: int) -> Any:
        return i % config[f"{name}_layer_period"] == config.get(f"{name}_layer_offset", 0)

    return rule


RULES: dict[str, Callable[[Config, int, int], Any]] = {
    "_sliding_window_pattern": every("_sliding_window_pattern"),
    "sliding_window_pattern": every("sliding_window_pattern"),
    "no_rope_layer_interval": every("no_rope_layer_interval"),
    "interleave_moe_layer_step": every("interleave_moe_layer_step"),
    "decoder_sparse_step": every("decoder_sparse_step"),
    "full_attention_interval": every("full_attention_interval"),
    "attn_layer_period": periodic("attn"),
    "expert_layer_period": periodic("expert"),
    "first_k_dense_replace": lambda config, i, count: i < config["first_k_dense_replace"],
    "max_window_layers": lambda config, i, count: i >= config["max_window_layers"],
    "num_kv_shared_layers": lambda config, i, count: i >= count - config["num_kv_shared_layers"],
    "moe_layer_freq": lambda config, i, count: i % config["moe_layer_freq"] == 0,
}


def active_rules(config: Config) -> list[str]:
    """Names of the fields of this config that are rules over layer indices."""
    names = [name for name in RULES if isinstance(config.get(name), int) and config[name] > 0]
    if not config.get("use_sliding_window"):
        names = [name for name in names if name != "max_window_layers"]
    return names


def by_rule(config: Config, i: int, count: int) -> tuple[Any, ...]:
    """What the rules say of layer ``i`` of ``count``."""
    cycles = [config[name] for name in CYCLES if isinstance(config.get(name), list | str) and config[name]]
    return (*(RULES[name](config, i, count) for name in active_rules(config)), *(c[i % len(c)] for c in cycles))


def layer_lists(config: Config, count: int) -> list[str]:
    """Names of the fields with an entry a layer (a string of letters counts)."""
    return [
        name
        for name, value in config.items()
        if isinstance(value, list | tuple | str)
        and len(value) == count
        and not (isinstance(value, str) and name != "hybrid_override_pattern")
        and name not in (*INDEX_LISTS, *CYCLES, *NOT_BY_LAYER)
    ]


def by_list(config: Config, i: int, count: int) -> tuple[Any, ...]:
    """What the lists say of layer ``i``."""
    entries = [repr(config[name][i]) for name in layer_lists(config, count)]
    return (*entries, *(i in config[name] for name in INDEX_LISTS if config.get(name)))


def pick(indices: list[int], kind: Callable[[int], Any], wanted: int) -> list[int]:
    """``wanted`` of ``indices`` in order: each kind first, then seconds, then thirds; repeated if there are
    not enough."""
    seen: dict[Any, int] = {}
    ranked = []
    for i in indices:
        seen[kind(i)] = seen.get(kind(i), 0) + 1
        ranked.append((seen[kind(i)], i))
    chosen = [i for _, i in sorted(ranked)][:wanted]
    while len(chosen) < wanted:
        chosen.append(chosen[-1])
    return sorted(chosen)


def smaller(name: str, config: Config) -> list[Config]:
    """Values to try for a rule in a model of few layers. What is small is kept: some engines know no other."""
    value = config[name]
    if name.endswith("_layer_period"):
        offset = name.replace("period", "offset")
        pairs = [(value, config.get(offset, 0))] if value <= 4 else [(4, 2), (2, 1), (3, 1)]
        return [{name: p, offset: o} for p, o in pairs]
    if name == "first_k_dense_replace":
        return [{name: 1}]
    if name == "max_window_layers":
        return [{name: n} for n in (2, 1, 3)]
    if name == "num_kv_shared_layers":
        return [{name: n} for n in (2, 3, 1, 4)]
    if name == "moe_layer_freq":
        return [{name: value}]
    return [{name: value}] if value <= 4 else [{name: n} for n in (2, 3, 4)]


def arrangements(config: Config, lengths: list[int]) -> Iterator[tuple[Config, int]]:
    """Smaller models that the rules allow, the shortest first: changed fields and number of layers."""
    for count in lengths:
        for changes in product(*(smaller(name, config) for name in active_rules(config))):
            yield {k: v for change in changes for k, v in change.items()}, count


def thin(config: Config, layers: int | None = None) -> Config:
    """The same config with few layers but, if it can be, every kind of layer, in their order."""
    config = with_default_rules(config)
    count = layer_count(config)
    if not count:
        return config
    kinds = [(by_rule(config, i, count), by_list(config, i, count)) for i in range(count)]
    few = {1: 2, 2: 4}.get(len(set(kinds)), max(4, min(len(set(kinds)), 6)))
    best: tuple[int, Config, list[int]] | None = None
    for changes, length in arrangements(config, [layers] if layers else list(range(min(few, count), 9))):
        chosen = fill(config, changes, kinds, length)
        if chosen is None:
            continue
        covered = len({kinds[i] for i in chosen})
        if best is None or covered > best[0]:
            best = (covered, changes, chosen)
        if covered == len(set(kinds)):
            break
    if best is None:  # the rules allow no such model: let them stand for themselves
        best = (0, {}, list(range(layers or few)))
    return keep(config, count, best[1], best[2])


def fill(config: Config, changes: Config, kinds: list[tuple[Any, Any]], length: int) -> list[int] | None:
    """For each layer of the smaller model the original one that it stands for; None if there is none."""
    new = [by_rule({**config, **changes}, j, length) for j in range(length)]
    chosen: dict[int, int] = {}
    for rule in set(new):
        places = [j for j in range(length) if new[j] == rule]
        originals = [i for i, kind in enumerate(kinds) if kind[0] == rule]
        if not originals:
            return None
        chosen |= dict(zip(places, pick(originals, lambda i: kinds[i], len(places)), strict=True))
    return [chosen[j] for j in range(length)]


def keep(config: Config, count: int, changes: Config, chosen: list[int]) -> Config:
    """The config with just the layers ``chosen``."""
    thinned = {**config, **changes}
    for name in layer_lists(config, count):
        entries = [config[name][i] for i in chosen]
        thinned[name] = "".join(entries) if isinstance(config[name], str) else entries
    for name in INDEX_LISTS:
        if config.get(name):
            thinned[name] = [j for j, i in enumerate(chosen) if i in config[name]]
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if config.get(name):
            thinned[name] = len(chosen)
    if not config.get("use_sliding_window", True) and config.get("max_window_layers"):
        thinned["max_window_layers"] = len(chosen)
    return thinned


# What layers remember.

FULL, RECURRENT, OTHER = Layer(), Layer("recurrent"), Layer("other")
BY_NAME = {
    "full_attention": FULL, "attention": FULL, "global_attention": FULL, "*": FULL,
    "linear_attention": RECURRENT, "mamba": RECURRENT, "mamba2": RECURRENT, "conv": RECURRENT,
    "recurrent": RECURRENT, "M": RECURRENT,
}  # fmt: skip
ALL_FULL = {
    "llama", "gemma", "cohere", "olmo", "olmo2", "smollm3", "glm", "glm4", "glm4_moe", "granite", "granitemoe",
    "gpt2", "gpt_neox", "olmoe", "deepseek_v2", "deepseek_v3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral",
    "mixtral", "phi3", "phi", "starcoder2", "stablelm", "seed_oss", "nemotron", "exaone4", "ministral",
    "ministral3", "opt", "gptj",
}  # fmt: skip
"""Families whose layers see everything where no window is given."""
SLIDING = {"mistral", "ministral", "mixtral", "phi3", "starcoder2", "phimoe"}
"""Families all of whose layers have the window, where there is one."""


def describe_layers(config: Config) -> tuple[Layer, ...]:
    """What each layer remembers, as far as the config tells; empty if it does not."""
    config = with_default_rules(config)
    count = layer_count(config)
    kind = str(config.get("model_type"))
    names = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if kind in ("mamba", "mamba2", "falcon_mamba"):
        return (RECURRENT,) * count
    if kind == "falcon_h1":  # both at once in every layer
        return (OTHER,) * count
    if config.get("block_types"):
        window = Layer("sliding", config.get("attention_window_size"))
        cycle = [window if name == "attention" else RECURRENT for name in config["block_types"]]
        return tuple(cycle[i % len(cycle)] for i in range(count))
    if kind == "jamba" or "attn_layer_period" in config:
        return tuple(FULL if by_rule_of("attn_layer_period", config, i, count) else RECURRENT for i in range(count))
    if names and len(names) == count:
        return tuple(of_name(str(name), config) for name in names)
    return by_window(config, kind, count)


def of_name(name: str, config: Config) -> Layer:
    if name == "sliding_attention":
        return Layer("sliding", config.get("sliding_window")) if config.get("sliding_window") else FULL
    if name == "chunked_attention":
        return Layer("chunked", config.get("attention_chunk_size")) if config.get("attention_chunk_size") else FULL
    return BY_NAME.get(name, OTHER)


def by_rule_of(name: str, config: Config, i: int, count: int) -> bool:
    return bool(config.get(name)) and bool(RULES[name](config, i, count))


def by_window(config: Config, kind: str, count: int) -> tuple[Layer, ...]:
    """Layers of a config without a list of their kinds."""
    window, chunk = config.get("sliding_window"), config.get("attention_chunk_size")
    if kind == "llama4_text":
        rope = config.get("no_rope_layers") or [(i + 1) % config["no_rope_layer_interval"] for i in range(count)]
        return tuple(Layer("chunked", chunk) if r and chunk else FULL for r in rope)
    if kind == "qwen3_next":
        return tuple(
            FULL if by_rule_of("full_attention_interval", config, i, count) else RECURRENT for i in range(count)
        )
    if window and kind in SLIDING:
        return (Layer("sliding", window),) * count
    if kind.startswith("qwen") and window and config.get("use_sliding_window"):
        from_layer = config.get("max_window_layers", count)
        return tuple(Layer("sliding", window) if i >= from_layer else FULL for i in range(count))
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if window and pattern and kind in ("gemma2", "gemma3_text", "cohere2", "exaone4"):
        is_full = [pattern[i % len(pattern)] == "G" if isinstance(pattern, str) else (i + 1) % pattern == 0
                   for i in range(count)]  # fmt: skip
        return tuple(FULL if full else Layer("sliding", window) for full in is_full)
    return (FULL,) * count if kind in ALL_FULL else ()


def bounded_only(config: Config) -> Config | None:
    """The same with two of its windowed or chunked layers and no others: beside full layers, through which every row
    depends on everything, their windows cannot be seen. None where the config does not list its layers, or has
    no two sorts."""
    layers = describe_layers(config)
    bounded = [i for i, layer in enumerate(layers) if layer.kind in ("sliding", "chunked")]
    if not bounded or len(bounded) == len(layers) or len(config.get("layer_types") or ()) != len(layers):
        return None
    return keep(config, len(layers), {}, bounded[:2])
