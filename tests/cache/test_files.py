"""Saved and loaded: bit for bit as if never stopped, also in a new process; whatever does not fit is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from exactkv import CheckpointPolicy, load_cache
from exactkv.cache import Cache, container, describe_file, join
from exactkv.errors import InputError, LoadError
from exactkv.models.model import Model
from tests.cache.helpers import MIXED, assert_exact, feed
from tests.hybrid import MAMBA2, hybrid_model
from tests.tiny import FULL, chunk, random_tokens, tiny_model, window

ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    "attention": tiny_model(MIXED),
    "float32": tiny_model([chunk(8), FULL, window(6)], torch.float32),
    "hybrid": hybrid_model(),
    "recurrent": hybrid_model([MAMBA2]),
}


def fed(model: Model, *lengths: int, **options) -> Cache:
    cache = model.new_cache(len(lengths), **{"step": 4, **options})
    feed(model, cache, *(random_tokens(n, r) for r, n in enumerate(lengths)))
    return cache


def stepped(model: Model, length: int, **options) -> Cache:
    cache = model.new_cache(**{"step": 4, **options})
    for token in random_tokens(length, 3):
        feed(model, cache, [token])
    return cache


def rewound(model: Model) -> Cache:
    cache = stepped(model, 30, slack=6)
    cache.rewind(25)
    return cache


def forked(model: Model) -> Cache:
    """Rows that share segments, one of which has gone on, one that has gone back."""
    cache = fed(model, 13, 30).fork(2)
    feed(model, cache, [1], [], [2, 3], [])
    feed(model, cache, *(random_tokens(9, r) for r in range(4)))
    cache.rewind([23, 20, 41, 12])
    return cache


def with_checkpoints(model: Model) -> Cache:
    cache = fed(model, 9, 20, checkpoints=CheckpointPolicy(every=4, max_bytes=200_000))
    cache.checkpoint(label="message")
    for n in range(15):
        feed(model, cache, [n], [n + 1])
    cache = cache.fork(2)
    cache.checkpoint([0], "prompt")
    feed(model, cache, *(random_tokens(12, r) for r in range(4)))
    return cache


def back_at_a_checkpoint(model: Model) -> Cache:
    cache = with_checkpoints(model)
    cache.rewind([10, 21, 23, 34])
    return cache


def shared_with_another(model: Model) -> tuple[Cache, Cache]:
    cache = fed(model, 19, 7)
    return cache, cache.select([1, 0])


STATES = {
    "empty": lambda m: m.new_cache(2),
    "no rows": lambda m: m.new_cache(0),
    "one token": lambda m: stepped(m, 1),
    **{f"after {n} steps": lambda m, n=n: stepped(m, n) for n in (5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17)},
    "reserved": lambda m: stepped(m, 21, max_length=64),
    "one piece": lambda m: fed(m, 37),
    "ragged": lambda m: fed(m, 7, 0, 21, 1),
    "slack": lambda m: stepped(m, 20, slack=5),
    "rewound": rewound,
    "rewound to 0": lambda m: rewound_to_0(m),
    "forked": forked,
    "joined": lambda m: join([fed(m, 5, 0), forked(m), m.new_cache(step=4)]),
    "checkpoints": with_checkpoints,
    "back at a checkpoint": back_at_a_checkpoint,
}


def rewound_to_0(model: Model) -> Cache:
    cache = fed(model, 12, 5)
    cache.rewind(0)
    return cache


def going_on(model: Model, cache: Cache) -> list[torch.Tensor]:
    """Logits of everything that one can do with it."""
    made, n = [], cache.batch_size
    if not n:
        return [torch.tensor(cache.lengths)]
    made.append(feed(model, cache, *([[5]] * n)))
    other = cache.fork(2)
    made.append(feed(model, cache, *(random_tokens(3 + r, r) for r in range(n))))
    made += [feed(model, cache, *([[t]] * n)) for t in random_tokens(6, 7)]
    made.append(feed(model, other, *([random_tokens(4, 8)] * (2 * n))))
    for back in (2, 9, 17, 40):
        reached = cache.rewind([max(0, length - back) for length in cache.lengths])
        made += [torch.tensor(reached), feed(model, cache, *([random_tokens(5, back)] * n))]
        cache.checkpoint()
        made.append(torch.tensor([cache.nbytes, cache.checkpoint_nbytes]))
        cache.check_integrity()
    return made


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in zip(a, b, strict=True)
    )


def test_going_on_in_a_new_process_is_bit_equal(tmp_path: Path) -> None:
    """Kind O."""
    expected = {}
    for kind, model in MODELS.items():
        for name, make in STATES.items():
            if name.endswith("steps") and kind in ("float32", "recurrent"):
                continue
            cache = make(model)
            file = tmp_path / f"{kind}-{name}.cache"
            cache.save(file)
            before = repr(cache)
            loaded = load_cache(file, model)
            assert repr(loaded) == before == repr(cache)
            assert [loaded.tokens(r) for r in range(loaded.batch_size)] == [
                cache.tokens(r) for r in range(cache.batch_size)
            ]
            expected[file] = going_on(model, cache)
            assert same(going_on(model, loaded), expected[file]), file.name
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    worker = [sys.executable, "-m", "tests.cache.files_worker", str(tmp_path)]
    subprocess.run(worker, check=True, env=environment, cwd=ROOT, timeout=300)
    for file, logits in expected.items():
        assert same(torch.load(file.with_suffix(".logits")), logits), file.name


@pytest.mark.parametrize("kind", MODELS)
def test_a_cache_that_shares_rows_with_another(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]
    mine, other = shared_with_another(model)
    mine.save(tmp_path / "mine")
    other.save(tmp_path / "other")
    loaded = [load_cache(tmp_path / name, model) for name in ("mine", "other")]
    for cache, back in zip((mine, other), loaded, strict=True):
        assert same(going_on(model, cache), going_on(model, back))


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_shared_is_saved_once(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]
    cache = fed(model, 300, step=64)
    cache.checkpoint()
    feed(model, cache, random_tokens(300))
    cache.save(tmp_path / "one")
    cache.fork(4).save(tmp_path / "four")
    one, four = ((tmp_path / name).stat().st_size for name in ("one", "four"))
    assert four <= one + 3 * 1500
    loaded = load_cache(tmp_path / "four", model)
    assert loaded.nbytes == cache.nbytes and loaded.checkpoint_nbytes == cache.checkpoint_nbytes
    assert len({id(row.checkpoints[0]) for row in loaded._rows}) == 1
    assert_exact_or_close(model, loaded)


def assert_exact_or_close(model: Model, cache: Cache) -> None:
    if model.dtype == torch.float64:
        assert_exact(model, cache)
    assert cache.rewind([300] * cache.batch_size) == [300] * cache.batch_size


def test_only_live_rows_are_saved(tmp_path: Path) -> None:
    model = MODELS["float32"]
    long, short = stepped(model, 40, max_length=4096), stepped(model, 40)
    long.save(tmp_path / "long")
    short.save(tmp_path / "short")
    assert abs((tmp_path / "long").stat().st_size - (tmp_path / "short").stat().st_size) < 64
    with safetensors.safe_open(tmp_path / "short", "pt") as file:  # a plain safetensors file
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert tensors["tokens.0"].tolist() == random_tokens(40, 3)
    assert not any(t.isnan().any() for t in tensors.values()), "dead rows are NaN"


def test_described(tmp_path: Path) -> None:
    cache = with_checkpoints(MODELS["hybrid"])
    cache.save(tmp_path / "file")
    told = describe_file(tmp_path / "file")
    assert [row["length"] for row in told["rows"]] == cache.lengths
    assert [[c["position"] for c in row["checkpoints"]] for row in told["rows"]] == [
        cache.checkpoints(r) for r in range(4)
    ]
    assert {c["label"] for row in told["rows"] for c in row["checkpoints"]} == {"", "message", "prompt"}
    assert (told["storage"], told["dtype"], told["slack"], told["step"]) == ("dense", "float64", 0, 4)
    assert [layer[0] for layer in told["layers"]] == ["window 5", "full", "chunk 8"]
    assert json.loads(json.dumps(told)) == told


def test_saved_over_an_older_one_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = MODELS["attention"], tmp_path / "file"
    stepped(model, 9).save(file)
    for broken in ("fsync", "replace"):

        def failing(*_):
            raise OSError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing) if broken == "fsync" else patch.setattr(Path, "replace", failing)
            with pytest.raises(OSError, match="disk full"):
                stepped(model, 20).save(file)
        assert [f.name for f in tmp_path.iterdir()] == ["file"]
        assert load_cache(file, model).lengths == [9]
    stepped(model, 20).save(str(file))
    assert load_cache(str(file), model).lengths == [20]
    with pytest.raises(InputError, match="no directory"):
        stepped(model, 3).save(tmp_path / "missing" / "file")
    with pytest.raises(InputError, match="directory"):
        stepped(model, 3).save(tmp_path)


# Refusals.


def test_an_altered_byte_anywhere_is_refused(tmp_path: Path) -> None:
    model = hybrid_model([window(4), MAMBA2])
    cache = stepped(model, 9)
    cache.checkpoint()
    cache.save(tmp_path / "good")
    content, file = (tmp_path / "good").read_bytes(), tmp_path / "bad"
    places = [*range(0, 9), *range(9, len(content), 20), len(content) - 1]
    for i, place in enumerate(places):
        altered = bytearray(content)
        altered[place] ^= 1 << (i % 8)
        file.write_bytes(altered)
        with pytest.raises(LoadError, match=str(file)):
            load_cache(file, model)
    assert len(places) > 150
    for end in [*range(0, 10), *range(10, len(content), 97), len(content) - 1]:
        file.write_bytes(content[:end])
        with pytest.raises(LoadError, match=r"truncated|not a saved cache"):
            load_cache(file, model)
        with pytest.raises(LoadError):
            describe_file(file)
    for more in (b"\0", content):
        file.write_bytes(content + more)
        with pytest.raises(LoadError, match="longer"):
            load_cache(file, model)


def other_models():
    base = [window(6), FULL]
    long = {"dtype": torch.float32}
    yield "weights", tiny_model(base, seed=1, **long), "other weights"
    yield "window", tiny_model([window(7), FULL], **long), "other layers.*window 6.*window 7"
    yield "more layers", tiny_model([*base, FULL], **long), "other layers.*2, this one has 3"
    yield "recurrent", hybrid_model([window(6), FULL, MAMBA2], torch.float32), "other recurrent layers"
    yield "dtype", tiny_model(base), "other dtype.*float32.*float64"
    yield "config", tiny_model(base, max_length=2048, **long), "other config"


@pytest.mark.parametrize("name,model,words", list(other_models()), ids=[n for n, _, _ in other_models()])
def test_another_model_is_refused(name, model, words, tmp_path):
    fed(tiny_model([window(6), FULL], torch.float32), 9).save(tmp_path / "file")
    with pytest.raises(LoadError, match=words) as caught:
        load_cache(tmp_path / "file", model)
    assert "load it with" in str(caught.value)
    with pytest.raises(LoadError):
        load_cache(tmp_path / "file", MODELS["attention"])


def rewritten(file: Path, **changes) -> None:
    """The same file with other content and right checksums, as another version might write it."""
    content, tensors = container.read(file)
    container.write(file, {**content, **changes}, tensors)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"storage": "int3"}, "storage is 'int3'"),
        ({"storage": "int8"}, "does not hold"),
        ({"max_length": 100}, "rope"),
        ({"max_length": 10**9, "reserve": True}, "does not fit this model"),
        ({"memories": []}, "does not hold"),
        ({"checkpoints": []}, "does not hold"),
        ({"slack": -1}, "does not fit"),
    ],
    ids=str,
)
def test_content_that_does_not_fit_is_refused(changes, words, tmp_path):
    model = MODELS["attention"]
    with_checkpoints(model).save(tmp_path / "file")
    rewritten(tmp_path / "file")
    assert load_cache(tmp_path / "file", model).lengths == [36, 36, 47, 47]
    rewritten(tmp_path / "file", **changes)
    with pytest.raises(LoadError, match=words):
        load_cache(tmp_path / "file", model)


def test_other_files_are_refused(tmp_path, monkeypatch):
    model, file = MODELS["attention"], tmp_path / "file"
    with pytest.raises(LoadError, match="does not exist"):
        load_cache(file, model)
    with pytest.raises(LoadError, match="cannot be read"):
        load_cache(tmp_path, model)
    for content in (b"", b"{}", b"PK\3\4" + bytes(200), b"\x80\x04" * 50, json.dumps({"a": 1}).encode() * 9):
        file.write_bytes(content)
        with pytest.raises(LoadError, match="not a saved cache"):
            load_cache(file, model)
    safetensors.torch.save_file({"a": torch.zeros(3)}, file)
    with pytest.raises(LoadError, match="another safetensors file"):
        load_cache(file, model)
    monkeypatch.setattr(container, "VERSION", 2)
    stepped(model, 3).save(file)
    monkeypatch.undo()
    with pytest.raises(LoadError, match="format '2'.*update"):
        load_cache(file, model)


def test_any_changed_weight_is_another_model() -> None:
    """Also one bit of one number, and the same numbers in another order."""
    spec = tiny_model([FULL]).spec
    weights = dict(tiny_model([FULL]).decoder.weights)
    name = max(weights, key=lambda n: weights[n].numel())
    found = {Model(spec, weights).fingerprint}
    for place in (0, 17, weights[name].numel() - 1):
        changed = weights[name].clone()
        changed.view(torch.int64).view(-1)[place] ^= 1
        found.add(Model(spec, weights | {name: changed}).fingerprint)
    found.add(Model(spec, weights | {name: weights[name].flip(0)}).fingerprint)
    assert len(found) == 5 and Model(spec, dict(weights)).fingerprint in found


def test_names_and_links(tmp_path: Path) -> None:
    """A name as long as there can be, one that is none, and a link, whose target is written."""
    model = MODELS["attention"]
    cache = stepped(model, 3)
    for name in ("n" * 255, "é" * 127):
        cache.save(tmp_path / name)
        assert load_cache(tmp_path / name, model).lengths == [3]
    (tmp_path / "link").symlink_to(tmp_path / "target")
    cache.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and load_cache(tmp_path / "target", model).lengths == [3]
    for name in ("a\0b", "", 3):
        for call in (cache.save, describe_file, lambda given: load_cache(given, model)):
            with pytest.raises(InputError, match="expected a path"):
                call(name)


def test_a_header_nested_too_deeply(tmp_path: Path) -> None:
    raw = b'{"a":' + b"[" * 200_000
    (tmp_path / "deep").write_bytes(len(raw).to_bytes(8, "little") + raw)
    for call in (describe_file, lambda given: load_cache(given, MODELS["attention"])):
        with pytest.raises(LoadError, match="altered"):
            call(tmp_path / "deep")
