"""Where a model's config, weights and tokenizer come from: a directory as Hugging Face writes it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from exactkv.errors import LoadError

if TYPE_CHECKING:
    from exactkv.models.families import Family
    from exactkv.models.tokenizer import Tokenizer

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The safetensors dtypes of weights as they are."""

_SMALL = {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
STORED = {**FLOATS, **_SMALL}
"""Those, and the ones in which quantized weights are stored."""

_PIECE = 4 << 20  # bytes that are read and converted at a time
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_AGAIN = "Download or copy it again."


class TensorSource(Protocol):
    """What `load` reads a model from.

    ``config``: as config.json. ``generation_config``: as generation_config.json, {} if there is none.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]

    def named(self, family: Family) -> Family:
        """The family, with the names that tensors have here, if they are not Hugging Face's."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, by its name."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Write a tensor into ``out``: of the same shape, or of that with axes split in several (`is_split`); of any
        floating dtype, stride and device. What is stored as it is goes there in pieces of a few megabytes, or one
        index of its first axis; what must be computed (quantized weights) may be held whole meanwhile, stored and
        computed. Different tensors may be read from different threads at once.
        Raises LoadError where the shapes differ or the file turns out to be damaged."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None if there is none. Raises LoadError where it cannot be read."""
        ...


class DirectorySource:
    """A directory with config.json and model.safetensors, or shards and model.safetensors.index.json.

    Only headers are read here; weights when they are asked for. Raises LoadError where files are missing,
    truncated or damaged, contradict each other, or are pickles.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config: dict[str, Any] = _read_config(self.path)
        self._tensors = {
            name: (file, tensor) for file in _weight_files(self.path) for name, tensor in file.tensors.items()
        }
        generation = self.path / "generation_config.json"
        self.generation_config: dict[str, Any] = (
            read_json(generation) if generation.is_file() else _generation_fields(self.config)
        )

    def named(self, family: Family) -> Family:
        return family

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, (_, tensor) in self._tensors.items()}

    def file_of(self, name: str) -> Path:
        """The file that holds a stored tensor."""
        return self._tensors[name][0].path

    def dtypes(self) -> dict[str, str]:
        """Every stored tensor's dtype, as the format calls it."""
        return {name: tensor.dtype for name, (_, tensor) in self._tensors.items()}

    def is_zero(self, name: str) -> bool:
        """Whether every value of a tensor is 0. Reads it, in pieces."""
        file, tensor = self._tensors[name]
        return tensor.dtype in STORED and not any(bool((piece != 0).any()) for _, _, piece in file.pieces(tensor))

    def dtype(self) -> torch.dtype:
        """The dtype that most bytes of the weights have; float32 if there are none."""
        counts: dict[str, int] = {}
        for _, tensor in self._tensors.values():
            if tensor.dtype not in FLOATS:
                continue
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.nbytes
        return FLOATS[max(counts, key=lambda dtype: counts[dtype], default="F32")]

    def read(self, name: str, out: Tensor) -> None:
        if name not in self._tensors:
            raise LoadError(f"{self.path} holds no tensor {name!r}; see shapes() for those it holds.")
        file, tensor = self._tensors[name]
        file.read(tensor, out)

    def stored(self, name: str) -> Tensor:
        """A whole tensor as it is stored, in any of STORED."""
        if name not in self._tensors:
            raise LoadError(f"{self.path} holds no tensor {name!r}, which its quantized weights need.")
        file, tensor = self._tensors[name]
        if tensor.dtype not in STORED:
            raise LoadError(f"{file.path}: tensor {name!r} is {tensor.dtype}; supported are {', '.join(STORED)}.")
        whole = torch.empty(tensor.shape, dtype=STORED[tensor.dtype])
        for first, last, piece in file.pieces(tensor):
            whole[first:last].copy_(piece) if tensor.shape else whole.copy_(piece)
        return whole

    def refuse_quantized(self) -> None:
        """Raise LoadError where weights are not stored as they are."""
        quantized = [
            f"{t.name} ({t.dtype})"
            for _, t in self._tensors.values()
            if t.dtype not in FLOATS and (t.name.endswith("weight") or t.dtype.startswith("F"))
        ]
        if quantized:
            raise LoadError(
                f"{self.path}: {len(quantized)} weights are not in {', '.join(FLOATS)}: {shown(quantized)}, and "
                "config.json has no quantization_config. Quantized weights are not supported without; take the model "
                "in bfloat16 or float16, or a GGUF file."
            )

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors are equal in shape and every value, also where their dtypes differ. Reads both, in
        pieces."""
        (file, a), (other_file, b) = self._tensors[first], self._tensors[second]
        if a.shape != b.shape or (a.dtype != b.dtype and not {a.dtype, b.dtype} <= FLOATS.keys()):
            return False
        wide = STORED[a.dtype] if a.dtype == b.dtype else torch.promote_types(FLOATS[a.dtype], FLOATS[b.dtype])
        rows = max(1, _PIECE * (a.shape or (1,))[0] // max(1, a.nbytes, b.nbytes))
        pairs = zip(file.pieces(a, rows=rows), other_file.pieces(b, rows=rows), strict=True)
        return all(torch.equal(x.to(wide), y.to(wide)) for (_, _, x), (_, _, y) in pairs)

    def tokenizer(self) -> Tokenizer | None:
        from exactkv.models.tokenizer import Tokenizer

        return Tokenizer.from_directory(self.path)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file. ``dtype``: the format's name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor in one of STORED; 0 of any other."""
        return prod(self.shape) * STORED[self.dtype].itemsize if self.dtype in STORED else 0


class SafetensorsFile:
    """One safetensors file: ``tensors`` by name. Raises LoadError, naming the file, where it is not whole.

    The file is mapped anew for every few megabytes, so that its pages do not stay in memory beside the weights.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        with self._open() as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no dict)
                stored = file.get_slice(name)
                self.tensors[name] = StoredTensor(name, stored.get_dtype(), tuple(stored.get_shape()))

    def read(self, tensor: StoredTensor, out: Tensor) -> None:
        """See TensorSource.read. Raises LoadError for another shape or a dtype not in FLOATS."""
        if tensor.dtype not in FLOATS:
            raise LoadError(
                f"{self.path}: tensor {tensor.name!r} is {tensor.dtype}; supported are {', '.join(FLOATS)}. "
                "Take the model's version that is not quantized."
            )
        if not is_split(tensor.shape, out.shape):
            raise LoadError(
                f"{self.path}: tensor {tensor.name!r} has the shape {list(tensor.shape)}; "
                f"it was to be written into {list(out.shape)}."
            )
        each = max(1, tensor.shape[0] // max(1, out.shape[0])) if tensor.shape else 1  # rows of an index of ``out``
        for first, last, piece in self.pieces(tensor, each):
            place = out[first // each : last // each] if tensor.shape else out
            place.copy_(piece.view(place.shape))

    def pieces(
        self, tensor: StoredTensor, multiple: int = 1, rows: int | None = None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """The tensor cut along its first axis, ``multiple`` rows or more a piece, or ``rows``: (from, to, values)."""
        count = tensor.shape[0] if tensor.shape else 1
        step = rows or multiple * max(1, _PIECE * count // max(1, tensor.nbytes * multiple))
        for first in range(0, count, step):
            last = min(count, first + step)
            with self._open() as file:
                piece = file.get_slice(tensor.name)[first:last] if tensor.shape else file.get_tensor(tensor.name)
            yield first, last, piece

    @contextmanager
    def _open(self) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except OSError as error:
            raise LoadError(f"can't read {self.path}: {error.strerror or error}.") from error
        except SafetensorError as error:
            raise LoadError(f"{self.path} is truncated or damaged: {error}. {_AGAIN}") from error


def is_split(shape: Sequence[int], given: Sequence[int]) -> bool:
    """Whether ``given`` is ``shape``, or that with axes split in several."""
    rest = list(given)
    for size in shape:
        found = rest.pop(0) if rest else 0
        while rest and found < size:
            found *= rest.pop(0)
        if found != size:
            return False
    return all(size == 1 for size in rest)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises LoadError, naming the file, where it cannot be read or is something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise LoadError(f"can't read {file}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file} is not valid JSON: {error}. {_AGAIN}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{file} holds a JSON {type(content).__name__}, expected an object. {_AGAIN}")
    return content


def shown(names: Sequence[str], limit: int = 10) -> str:
    """The first names of a list, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        others = sorted(file.name for file in path.glob("*.gguf"))
        hint = "A model directory holds config.json, safetensors files and tokenizer.json; GGUF files work too."
        if others:
            hint = f"It holds GGUF files; give one of them: {shown(others)}."
        raise LoadError(f"{path} has no config.json. {hint}")
    return read_json(path / "config.json")


def _generation_fields(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json itself says of generation, for models without generation_config.json."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    nested = config.get("text_config")
    fallback = nested if isinstance(nested, dict) else {}
    fields = {name: fallback.get(name) if config.get(name) is None else config[name] for name in names}
    return {name: value for name, value in fields.items() if value is not None}


def _weight_files(path: Path) -> list[SafetensorsFile]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [SafetensorsFile(single)]
    if index.is_file():
        return _shards(path, index)
    only = path / "model-00001-of-00001.safetensors"  # one shard needs no index
    if only.is_file():
        return [SafetensorsFile(only)]
    raise _no_weights(path)


def _shards(path: Path, index: Path) -> list[SafetensorsFile]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
        raise LoadError(f"{index} has no weight_map from tensor names to file names. {_AGAIN}")
    names = sorted(set(places.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise LoadError(f"{index} names files outside of its directory: {shown(outside)}.")
    if missing := [name for name in names if not (path / name).is_file()]:
        there = _there(path, names)
        stale = " If those are the whole model, the index is an older one's: take theirs." if there else ""
        raise LoadError(
            f"{path}: {len(missing)} of {len(names)} shards that {index.name} names are missing: "
            f"{shown(missing)}. Download or copy them too.{there}{stale}"
        )
    files = {name: SafetensorsFile(path / name) for name in names}
    if lacking := [f"{t} (in {file})" for t, file in places.items() if t not in files[file].tensors]:
        raise LoadError(
            f"{path}: {len(lacking)} tensors are not in the shards where {index.name} places them: "
            f"{shown(lacking)}. The files belong to different versions; download them again."
        )
    count = sum(len(file.tensors) for file in files.values())
    if count != len({name for file in files.values() for name in file.tensors}):
        raise LoadError(f"{path}: some tensors are in several shards. The files do not belong together.")
    return list(files.values())


def _there(path: Path, but: Collection[str] = ()) -> str:
    """A sentence that names the weight files of a directory, but for some; nothing if there are none."""
    others = sorted(file.name for pattern in ("*.safetensors", "*.gguf") for file in path.glob(pattern))
    others = [name for name in others if name not in but]
    return f" It holds {shown(others)}." if others else ""


def _no_weights(path: Path) -> LoadError:
    if (path / "model.safetensors").is_dir():
        return LoadError(f"{path / 'model.safetensors'} is a directory, expected a file. {_AGAIN}")
    if pickles := sorted({file.name for pattern in _PICKLES for file in path.glob(pattern)}):
        return LoadError(
            f"{path} has its weights only as pickles ({shown(pickles)}), which can run any code and are "
            "never read. Where you trust them, convert them: transformers' AutoModelForCausalLM"
            ".from_pretrained(path).save_pretrained(other_path) writes safetensors."
        )
    return LoadError(
        f"{path} has no model.safetensors and no model.safetensors.index.json.{_there(path)} "
        "Download the weights too, or give a .gguf file."
    )
