"""A directory, GGUF file, hub id or embedded model -> Model."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactkv.errors import ExactKVError, InputError, LoadError
from exactkv.models import embedded
from exactkv.models.config import Config
from exactkv.models.families import Family, find_family, model_type_of, text_type
from exactkv.models.formats import open_directory
from exactkv.models.model import Model
from exactkv.models.packed_files import PackedSource, StoredPacked
from exactkv.models.packing import packing, weight_format
from exactkv.models.parameters import parameters
from exactkv.models.plan import Piece, as_saved, plan_reading, stored_name
from exactkv.models.source import DirectorySource, TensorSource, read_json
from exactkv.models.spec import DecoderSpec, check_spec
from exactkv.ops.quantize import WeightFormat, pack

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>\S+))?")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_THREADS = 2  # more gained nothing
_ALSO = "A local directory with config.json and safetensors works too, and so does a .gguf file."


def load(
    path: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    quantize: str | None = None,
    accept_fields: Collection[str] = (),
    progress: bool | None = None,
) -> Model:
    """Load a model with its tokenizer.

    ``path``: a directory with config.json and safetensors, a .gguf file, a hub id ("org/name" or
    "org/name@revision"), or an embedded model's name ("smollm2", "gemma3"); what exists as a file or
    directory is taken as that. ``device``: "auto" is cuda where there is one, else cpu. ``dtype``: "auto" is
    what the config names, else what most of the weights are stored in; for a GGUF file bfloat16.
    ``quantize``: round weights to "int8" or "int4" on loading, in groups of 128 and 32 numbers of a row, or as many as
    stand after a colon ("int4:64"); which ones: docs/quantization.md. None takes them as the files mean them, packed
    where `exactkv quantize` has packed them.
    ``accept_fields``: fields of the config, or of an object in it, that the caller has judged not to change the
    arithmetic.
    ``progress``: a bar on stderr always, never, or (None) on a terminal if loading takes more than a second.

    Memory for the weights is taken once, on ``device`` in ``dtype``, and filled in pieces of a few megabytes or of one
    expert. Weights that must be computed (quantized ones, some of GGUF's) may take a second copy of two tensors at a
    time meanwhile.
    Raises InputError for arguments that do not fit, LoadError where the model cannot be found, read or run.
    """
    return load_with_source(path, device, dtype, quantize, accept_fields, progress)[0]


def load_with_source(
    path: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    quantize: str | None = None,
    accept_fields: Collection[str] = (),
    progress: bool | None = None,
) -> tuple[Model, TensorSource]:
    """`load`, and what the model was read from."""
    form = None if quantize is None else weight_format(quantize)
    on, wanted = as_device(device), as_dtype(dtype)
    place, name = locate(path, quiet=progress is False)
    source, stored = _open(place, accept_fields)
    family, fields = text_config(source.config)
    spec = read_spec(family, fields, accept_fields)
    family = as_saved(source.named(family), source.shapes())
    is_zero = source.is_zero if isinstance(source, DirectorySource) else lambda _: False
    pieces = plan_reading(family, spec, source.shapes(), name, is_zero)
    _check_tied(source, family, spec, name)
    stored_packed = source.packed() if isinstance(source, PackedSource) else {}
    if form is not None and stored_packed:
        raise InputError(f"quantize is {quantize!r}, but {name}'s weights are quantized already; leave it None")
    formats = {} if form is None else packing(spec, form)
    tokenizer = source.tokenizer()  # before there are weights: making it takes memory for a while
    reader = _Reader(source, spec, wanted or _config_dtype(fields) or stored, on, name)
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.ours, []).append(piece)
    with ThreadPoolExecutor(_THREADS) as pool, _Bar(name, reader.total, progress) as bar:
        reader.allocate(ours for ours in by_name if ours not in formats and ours not in stored_packed)
        works: list[Callable[[], int]] = []
        for ours, its in by_name.items():
            if ours in stored_packed:
                works.append(partial(reader.take, ours, stored_packed[ours]))
            elif ours in formats:
                works.append(partial(reader.pack, ours, its, formats[ours]))
            else:
                works += [partial(piece.fill, reader.weights, source) for piece in its]
        for nbytes in pool.map(lambda work: work(), works):
            bar.advance(nbytes)
    return Model(spec, reader.weights, tokenizer, source.generation_config, name=name), source


class _Reader:
    """Fills ``weights``: a decoder's parameters by name, in one dtype on one device."""

    def __init__(self, source: TensorSource, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, name: str):
        self.source, self.shapes, self.name = source, {n: p.shape for n, p in parameters(spec).items()}, name
        self.dtype, self.device = dtype, device
        self.weights: dict[str, Tensor] = {}

    @property
    def total(self) -> int:
        """Bytes of all parameters before any is packed."""
        return sum(map(prod, self.shapes.values())) * self.dtype.itemsize

    def allocate(self, names: Iterable[str]) -> None:
        """Memory for these parameters, at once."""
        self.weights |= {ours: self._empty(ours) for ours in names}

    def pack(self, ours: str, pieces: Iterable[Piece], form: WeightFormat) -> int:
        """Read one parameter and keep it packed; the bytes that were read."""
        read = {ours: self._empty(ours)}
        nbytes = sum(piece.fill(read, self.source) for piece in pieces)
        self.weights[ours] = pack(read.pop(ours), form)
        return nbytes

    def take(self, ours: str, stored: StoredPacked) -> int:
        """Keep one parameter as it is packed in the files."""
        self.weights[ours] = stored.read(self.shapes[ours], self.dtype, self.device)
        return prod(self.shapes[ours]) * self.dtype.itemsize

    def _empty(self, ours: str) -> Tensor:
        try:
            return torch.empty(self.shapes[ours], dtype=self.dtype, device=self.device)
        except (RuntimeError, MemoryError) as error:
            raise LoadError(
                f"{self.name}: its weights take {self.total / 1e9:.1f} GB in {str(self.dtype).removeprefix('torch.')}, "
                f"less where quantized, and {self.device} has not so much left ({error}). Take a smaller dtype, "
                'quantize="int8" or "int4", a smaller model or another device.'
            ) from error


def locate(path: str | Path, quiet: bool = False) -> tuple[Path, str]:
    """The local directory or file that ``path`` (as in `load`) means, and a short name for the model.

    Downloads a hub id's files into the hub's cache where they are not there yet; ``quiet``: without progress
    bars. Raises LoadError where there is nothing."""
    if not isinstance(path, (str, Path)):
        raise InputError(f"path is a {type(path).__name__}; expected a str or a Path")
    given = str(path)
    local = os.path.expanduser(given)
    if os.path.exists(local):
        return Path(local), os.path.basename(os.path.abspath(local)).removesuffix(".gguf")
    if isinstance(path, str):
        if path in embedded.MODELS:
            return embedded.find(path), path
        match = _HUB_ID.fullmatch(path)
        if match and not path.endswith((".gguf", ".safetensors")):
            return _download(match["repo"], match["revision"], quiet), match["repo"]
    raise LoadError(
        f"there is no file or directory {given!r}. Expected a model directory, a .gguf file, a hub id "
        f"such as 'org/name', or one of the embedded models: {', '.join(embedded.MODELS)}."
    )


def _download(repo: str, revision: str | None, quiet: bool) -> Path:
    """Fetch a model's files from the hub, its config first: an unsupported model costs no more than that."""
    import huggingface_hub as hub
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    def fetch(*patterns: str) -> Path:
        found = hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*", "consolidated*"],
            tqdm_class=Silent if quiet else None,
        )
        return Path(found)

    which = f"{repo!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        config = fetch("config.json") / "config.json"
        if config.is_file():
            find_family(read_json(config))
        return fetch(*_HUB_FILES)
    except ExactKVError:
        raise
    except GatedRepoError as error:
        reason = f"it is gated: accept its terms at https://huggingface.co/{repo} and run `hf auth login`"
        cause: Exception = error
    except RevisionNotFoundError as error:
        reason, cause = "the hub has the model, but not this revision", error
    except RepositoryNotFoundError as error:
        reason, cause = "the hub has no such model, or it is private: then run `hf auth login`", error
    except LocalEntryNotFoundError as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        reason, cause = f"it is not in the local cache, and {offline}", error
    except Exception as error:  # whatever the network, the disk or the hub's client comes up with
        reason, cause = f"{type(error).__name__}: {error}", error
    raise LoadError(f"can't get the model {which} from the Hugging Face hub: {reason}. {_ALSO}") from cause


def _open(path: Path, accept_fields: Collection[str]) -> tuple[TensorSource, torch.dtype]:
    """The source at an existing path, and the dtype that "auto" means where the config does not say."""
    if path.is_dir():
        directory = open_directory(path, accept_fields)
        return directory, directory.dtype()
    if path.suffix == ".safetensors":
        raise LoadError(f"{path} holds weights only; give the directory that holds it and its config.json")
    from exactkv.models.gguf import GGUFSource

    return GGUFSource(path), torch.bfloat16


def text_config(config: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family, and the config of its text model: it may lie in a field of its own, some fields beside. Its
    "model_type", by which absent fields and some arithmetic are settled, is one that the family knows."""
    family = find_family(config)
    inner = config.get(family.nested) if family.nested else None
    if inner is None:
        return family, {**config, "model_type": model_type_of(family, config)}
    if not isinstance(inner, dict):
        raise LoadError(f"config of a {family.name} model: {family.nested} = {inner!r}; expected an object")
    outer = {name: config[name] for name in ("tie_word_embeddings", "dtype", "torch_dtype") if name in config}
    said = {
        name: value for name, value in inner.items() if value is not None or name not in outer
    }  # null may mean "none"
    return family, {**outer, **said, "model_type": text_type(family, inner)}


def read_spec(family: Family, fields: Mapping[str, Any], accept_fields: Collection[str] = ()) -> DecoderSpec:
    """The decoder that a config means. Raises LoadError where a field is missing, unsupported or unknown."""
    config = Config(fields, family.name, accept_fields)
    try:
        spec = family.spec(config)
        check_spec(spec)
    except LoadError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise LoadError(
            f"config of a {family.name} model: a field has a value that makes no sense ({error}). "
            "Compare config.json with the original."
        ) from error
    config.finish()
    return spec


def _check_tied(source: TensorSource, family: Family, spec: DecoderSpec, name: str) -> None:
    """Where the head is the embedding, files may hold it a second time, but not with other values."""
    if not spec.tied_head or not isinstance(source, DirectorySource):
        return
    for prefix in family.prefixes:
        shapes = source.shapes()
        head, embedding = (stored_name(family, prefix, shapes, n) for n in ("head.weight", "embedding.weight"))
        if head in shapes and embedding in shapes and not source.same(head, embedding):
            raise LoadError(
                f"{name}: the config ties the head to the embedding (tie_word_embeddings), but the files "
                f"hold a {head} with other values. If that is the model's head, set "
                "tie_word_embeddings to false in config.json; else remove the tensor."
            )


def _config_dtype(fields: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that the config names; None where it names none in which one can compute. Raises LoadError."""
    field = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    named = fields.get(field)
    if named is None or named == "auto":
        return None
    name = str(named).removeprefix("torch.")
    if name in DTYPES or not isinstance(getattr(torch, name, None), torch.dtype):
        if name not in DTYPES:
            raise LoadError(
                f"config.json: {field} is {named!r}, expected one of {', '.join(DTYPES)}; correct it, or choose with "
                "load(..., dtype=...)"
            )
        return DTYPES[name]
    return None  # of quantized weights, say


def as_dtype(given: str | torch.dtype) -> torch.dtype | None:
    """The dtype that was asked for; None for "auto". Raises InputError for what is none in which one can compute."""
    name = str(given).removeprefix("torch.") if isinstance(given, torch.dtype) else given
    if not isinstance(name, str) or (name != "auto" and name not in DTYPES):
        raise InputError(f"dtype is {given!r}; expected 'auto', {', '.join(map(repr, DTYPES))}, or a torch.dtype")
    return DTYPES.get(name)


def as_device(given: str | torch.device) -> torch.device:
    """The device that was asked for. Raises InputError where there is no such."""
    if given == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"device is {given!r}, which this machine or this build of torch does not have ({error}); "
            "expected 'auto', 'cpu', or 'cuda' where there is a GPU"
        ) from error
    if device.type == "meta":
        raise InputError("device is 'meta', which holds no values; expected 'auto', 'cpu' or 'cuda'")
    return device


class _Bar:
    """Progress on stderr: ``wanted`` always, never, or (None) on a terminal once a second has passed."""

    def __init__(self, name: str, total: int, wanted: bool | None):
        self.name, self.total, self.done = name, total, 0
        self.wanted = sys.stderr.isatty() if wanted is None else wanted
        self.vanishes = wanted is None
        self.not_before = time.monotonic() + (1.0 if wanted is None else 0.0)
        self.shown: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown is not None:
            self.shown.stop()

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.shown is None and self.wanted and time.monotonic() >= self.not_before:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            self.shown = Progress(*columns, console=Console(stderr=True), transient=self.vanishes)
            self.task = self.shown.add_task(f"loading {self.name}", total=self.total)
            self.shown.start()
        if self.shown is not None:
            self.shown.update(self.task, completed=self.done)
