"""mlx-lm as a target: healthy architectures are exact, abilities do what they say, scripts run alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed (pip install mlx-lm 'mlx[cpu]')")

if tuple(int(n) for n in metadata.version("mlx-lm").split(".")[:2]) < (0, 32):
    pytest.skip("mlx-lm before 0.32 is not exact for these architectures", allow_module_level=True)

from exactkv.errors import LoadError
from exactkv.verify.target import NotSupported, Refused, Request
from exactkv.verify.targets import as_target, from_recipe
from exactkv.verify.targets import load as load_target
from exactkv.verify.targets import mlx as adapter

TEXT = np.random.default_rng(0).integers(1, 97, (4, 40)).tolist()
TOLERANCE = 1e-4
COMMON: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 32000, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        **COMMON, "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 1024,
        "interleave_moe_layer_step": 1, "intermediate_size_mlp": 512, "num_experts_per_tok": 1, "hidden_act": "silu",
        "num_local_experts": 8, "rope_scaling": None, "use_qk_norm": True, "attn_temperature_tuning": 4,
    },
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "model_type": "llama"},
    "qwen2": {**COMMON, "model_type": "qwen2"},
    "qwen3": {**COMMON, "model_type": "qwen3"},
    "gemma3_text": {
        **COMMON, "model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 4,
        "query_pre_attn_scalar": 64, "rope_local_base_freq": 10000.0, "rope_scaling": None,
    },
    "llama4": LLAMA4,
    "mamba2": {
        **COMMON, "model_type": "mamba2", "num_heads": 16, "head_dim": 64, "state_size": 64, "conv_kernel": 4,
        "n_groups": 1, "expand": 2, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, 100.0], "time_step_rank": 16, "chunk_size": 64, "num_hidden_layers": 4,
    },
}  # fmt: skip


def made(tmp_path: Path, name: str, **changes: Any) -> adapter.MlxTarget:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS[name], **changes}))
    target = load_target("mlx", str(path))
    assert isinstance(target, adapter.MlxTarget)
    return target


def apart(target: adapter.MlxTarget, logits: Any, tokens: Sequence[int]) -> float:
    """How far the logits of the last of ``tokens`` are from the one pass, relative to the largest logit."""
    right = target.forward([list(tokens)])[0]
    return float(np.abs(np.asarray(logits) - right[len(right) - len(logits) :]).max() / np.abs(right).max())


def fed(target: adapter.MlxTarget, tokens: Sequence[int], cache: Any = None) -> tuple[Any, Any]:
    cache = target.new_cache() if cache is None else cache
    return cache, np.concatenate([target.feed(cache, [t]) for t in tokens])


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_and_pieces_are_the_one_pass(tmp_path: Path, name: str) -> None:
    target = made(tmp_path, name)
    text = TEXT[0]
    assert len(target.layers) > 0 and target.small and target.vocab_size == 97
    assert 1 < np.abs(target.forward([text])).max() < 60
    assert apart(target, fed(target, text)[1], text) < TOLERANCE
    for kind in target.caches:
        cache, logits = target.new_cache(kind), []
        for start, size in ((0, 11), (11, 1), (12, 3), (15, 25)):
            logits.append(target.feed(cache, text[start : start + size]))
        assert apart(target, np.concatenate(logits), text) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "llama4"])
def test_the_step_of_allocation_changes_nothing(tmp_path: Path, name: str) -> None:
    target = made(tmp_path, name)
    sizes = set()
    for step in (1, 4, 256):
        cache = target.new_cache(step=step)
        assert apart(target, fed(target, TEXT[0][:20], cache)[1], TEXT[0][:20]) < TOLERANCE
        sizes.add(target.nbytes(cache))
    assert len(sizes) > 1, "the step is not used"


def test_what_mlx_cannot_do_is_not_supported(tmp_path: Path) -> None:
    target = made(tmp_path, "mamba2")
    cache = target.new_cache()
    for call in (
        lambda: target.new_cache(max_length=5), lambda: target.new_cache(step=4), lambda: target.length(cache),
        lambda: target.feed(cache, [1], positions=True), lambda: target.rewind(cache, 1), lambda: target.reset(cache),
    ):  # fmt: skip
        with pytest.raises(NotSupported):
            call()
    assert target.quantized_caches == ()


def test_rewinding(tmp_path: Path) -> None:
    target = made(tmp_path, "llama")
    cache, _ = fed(target, TEXT[0][:20])
    assert target.rewind(cache, 7) == 7 and target.length(cache) == 13
    assert apart(target, target.feed(cache, TEXT[1][:5]), TEXT[0][:13] + TEXT[1][:5]) < TOLERANCE
    windowed = made(tmp_path, "gemma3_text")
    cache, _ = fed(windowed, TEXT[0][:20])
    with pytest.raises(Refused):
        windowed.rewind(cache, 1)
    assert apart(windowed, windowed.feed(cache, TEXT[1][:5]), TEXT[0][:20] + TEXT[1][:5]) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_fork_save_load_and_another_process(tmp_path: Path, name: str) -> None:
    target = made(tmp_path, name)
    cache, _ = fed(target, TEXT[0][:13])
    target.save(cache, tmp_path / "saved")
    copy = target.fork(cache)
    target.feed(cache, TEXT[1][:3])
    again = from_recipe(json.loads(json.dumps(target.recipe())))
    for holder, held in ((target, copy), (again, again.load(tmp_path / "saved"))):
        assert apart(target, holder.feed(held, TEXT[0][13:22]), TEXT[0][:22]) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_rows_of_a_batch_are_rows_alone(tmp_path: Path, name: str) -> None:
    target = made(tmp_path, name)
    batch = attempt(target.new_batch, 3)
    at, who = [0, 0, 0], [0, 1, 2]

    def feed(*counts: int) -> None:
        rows = [TEXT[w][a : a + n] for w, a, n in zip(who, at, counts, strict=True)]
        for i, logits in enumerate(attempt(target.feed_batch, batch, rows)):
            at[i] += counts[i]
            assert apart(target, logits, TEXT[who[i]][: at[i]]) < TOLERANCE

    feed(3, 1, 13)
    for _ in range(3):
        feed(1, 1, 1)
    if name != "mamba2":
        assert target.lengths(batch) == at
    alone = target.extract(batch, 1)
    assert apart(target, fed(target, TEXT[1][4:9], alone)[1], TEXT[1][:9]) < TOLERANCE
    batch, who, at = target.select(batch, [0, 2]), [0, 2], [6, 16]
    feed(1, 1)
    batch = attempt(target.join, [batch, fed(target, TEXT[3][:5])[0]])
    who, at = [*who, 3], [*at, 5]
    for _ in range(3):
        feed(1, 1, 1)


def attempt(call: Any, *given: Any) -> Any:
    try:
        return call(*given)
    except NotSupported as error:
        pytest.skip(f"this mlx-lm: {error}")


def test_the_store_gives_what_it_says(tmp_path: Path) -> None:
    target = made(tmp_path, "llama")
    store, text = attempt(target.new_store), TEXT[0]
    target.put(store, text[:20], fed(target, text[:20])[0])
    for asked in (text[:5], text[:20], text[:23], text[:10] + TEXT[1][:4], TEXT[2][:6]):
        hit = target.get(store, asked)
        if hit.length:
            rest = [*asked[hit.length :], 7, 8]
            assert apart(target, target.feed(hit.cache, rest), [*asked, 7, 8]) < TOLERANCE
    assert target.get(store, text[:23], salt="another").length == 0
    said, held = attempt(target.store_nbytes, store)
    assert said == held > 0


@pytest.mark.parametrize("generator", [g.name for g in adapter.GENERATORS])
def test_generators_are_greedy(tmp_path: Path, generator: str) -> None:
    target = made(tmp_path, "llama")
    sizes = zip((2, 7, 13, 1, 9), (5, 9, 3, 6, 1), strict=True)
    requests = [Request(tuple(text[:n]), m) for text, (n, m) in zip([*TEXT, TEXT[0]], sizes, strict=True)]
    told = attempt(target.generate, generator, requests)
    for request, done in zip(requests, told, strict=True):
        whole = list(request.prompt)
        for _ in range(request.max_tokens):
            whole.append(int(target.forward([whole])[0, -1].argmax()))
        assert [*request.prompt, *done.tokens] == whole
        if done.cache is not None:
            held = target.length(done.cache)
            more = [*whole[held:], 1, 2]
            assert apart(target, target.feed(done.cache, more), whole[:held] + more) < TOLERANCE
    kind = next(g for g in target.generators if g.name == generator)
    if kind.stops:
        stop = told[1].tokens[2]
        [done] = attempt(target.generate, generator, [Request(requests[1].prompt, 9, (stop,))])
        assert done.tokens == told[1].tokens[: told[1].tokens.index(stop) + 1] and done.finish_reason == "stop"
    if kind.closes:
        [done] = target.generate(generator, requests[1:2], close_after=2)
        assert done.tokens == told[1].tokens[:2]
        assert target.length(done.cache) <= len(requests[1].prompt) + 2


def test_quantized_caches_are_their_own_one_pass(tmp_path: Path) -> None:
    target = made(tmp_path, "qwen2")
    assert target.quantized_caches == ("8 bit", "4 bit")
    for kind in target.quantized_caches:
        whole = target.feed(target.new_cache(kind), TEXT[0])
        cache = target.new_cache(kind, step=4)
        steps = np.concatenate([target.feed(cache, [t]) for t in TEXT[0]])
        assert np.abs(steps - whole).max() < TOLERANCE * np.abs(whole).max()
        assert np.abs(whole - target.forward([TEXT[0]])[0]).max() > 1e-3


def test_numbers_of_the_model(tmp_path: Path) -> None:
    target = made(tmp_path, "gemma3_text")
    calm = target.forward([TEXT[0]])
    assert 0 < np.abs(target.jittered([TEXT[0]], 1e-6, 0) - calm).max() < 1e-2
    assert np.abs(target.jittered([TEXT[0]], 0.1, 0) - calm).max() > 1e-2
    states = target.hidden(TEXT[0][:9])
    assert len(states) == len(target.layers) + 1
    fed_states = target.feed_hidden(target.new_cache(), TEXT[0][:9])
    assert all(np.abs(a - b).max() < 1e-4 * np.abs(a).max() for a, b in zip(states, fed_states, strict=True))
    assert np.abs(attempt(target.precise, [TEXT[0]]) - calm).max() < 1e-3
    np.testing.assert_array_equal(target.forward([TEXT[0]]), calm)
    other = target.reseeded(5).forward([TEXT[0]])
    assert np.abs(other - calm).max() > 0.1


def test_models_as_objects_and_what_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = as_target(made(tmp_path, "qwen3").model)
    assert apart(target, fed(target, TEXT[0][:9])[1], TEXT[0][:9]) < TOLERANCE  # type: ignore[arg-type]
    with pytest.raises(NotSupported):
        target.recipe()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for given in ("nobody/such-a-model", str(tmp_path / "missing.json")):
        with pytest.raises(LoadError):
            load_target("mlx", given)
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of", "hidden_size": 8, "num_attention_heads": 2}')
    with pytest.raises(LoadError, match="unheard_of"):
        load_target("mlx", str(tmp_path / "config.json"))


def test_a_script_runs_without_exactkv(tmp_path: Path) -> None:
    target = made(tmp_path, "llama4")
    head = target.preamble(frozenset({"new_cache", "feed", "rewind", "length", "fork", "hidden", "new_store"}))
    lines = [
        "text = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]",
        "cache = new_cache(step=4)",
        "logits = np.concatenate([feed(cache, [t]) for t in text])",
        "print(float(abs(logits - full([text])[0]).max()), length(cache))",
    ]
    script = tmp_path / "script.py"
    script.write_text(head + "\n".join(lines))
    run = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    difference, length = run.stdout.split()
    assert "exactkv" not in head and int(length) == 12
    assert (
        abs(float(difference) - np.abs(fed(target, list(range(5, 17)))[1] - target.forward([range(5, 17)])).max()) < 1
    )
