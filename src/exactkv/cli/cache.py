"""`exactkv cache`: what saved caches and prompt stores hold, whether they are whole, and making them smaller."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exactkv.cli.options import size_of
from exactkv.cli.output import print_json
from exactkv.errors import InputError, LoadError

if TYPE_CHECKING:
    from rich.table import Table

WHOLE, BROKEN, COULD_NOT_RUN = 0, 1, 2
"""Exit codes of verify."""
AGES = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

cache = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
    help="Look at, check and prune saved caches and prompt stores.",
)  # fmt: skip
Place = Annotated[Path, typer.Argument(metavar="PATH", help="A prompt store's directory, or a saved cache's file.")]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A prompt store's directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@cache.command(name="ls")
def ls(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A prompt store, or a directory of saved caches.")],
    as_json: Json = False,
) -> None:
    """List the texts of a prompt store, and the saved caches in a directory."""
    from exactkv.cache.store.inspect import describe_store, is_store

    if not directory.is_dir():
        raise InputError(f"{directory} is no directory; for a single file there is: exactkv cache show FILE")
    found = describe_store(directory) if is_store(directory) else None
    saved, broken = _saved(directory)
    if found is None and not saved and not broken:
        raise InputError(f"{directory} holds neither a prompt store nor a saved cache")
    if as_json:
        print_json({"store": found, "files": saved, "broken": broken}, indent=2)
        return
    from exactkv.cache.report import human_bytes

    if found is not None:
        names = {space["id"]: _space(space) for space in found["spaces"]}
        table = _table("text", "model", "tokens", "bytes", "of its own", "checkpoints", "used")
        for text in sorted(found["texts"], key=lambda t: -float(t["used"])):
            sizes = (human_bytes(text["bytes"]), human_bytes(text["own_bytes"]))
            marks, used = str(len(text["checkpoints"])), _age(text["used"])
            table.add_row(str(text["id"]), names[text["space"]], str(text["tokens"]), *sizes, marks, used)
        _print(
            table, f"{len(found['texts'])} texts, {human_bytes(found['bytes'])} in all (what texts share counts once)"
        )
    for one in broken:
        print(f"broken: {Path(one['file']).name}: {one['what']}")
    if saved:
        table = _table("file", "model", "rows", "tokens", "bytes")
        for one in saved:
            lengths = ", ".join(str(row["length"]) for row in one["rows"])
            name = one["model"].get("name") or one["model"].get("family", "")
            table.add_row(Path(one["file"]).name, name, str(len(one["rows"])), lengths, human_bytes(one["bytes"]))
        _print(table, f"{len(saved)} saved caches")


@cache.command(name="show")
def show(place: Place, as_json: Json = False) -> None:
    """Show what a prompt store or a saved cache holds, and whose it is."""
    from exactkv.cache import describe_file
    from exactkv.cache.report import human_bytes
    from exactkv.cache.store.inspect import describe_store

    found = describe_store(place) if place.is_dir() else describe_file(place)
    if as_json:
        print_json(found, indent=2)
        return
    if not place.is_dir():
        lines = [f"{place}: a saved cache, {human_bytes(found['bytes'])}, written by exactkv {found['exactkv']}"]
        model = found["model"]
        lines.append(f"model       {model.get('name', '')} ({model.get('family', '')}), {found['identity'][:12]}")
        lines.append(f"storage     {found['storage']} {found['dtype']}, slack {found['slack']}")
        for r, row in enumerate(found["rows"]):
            marks = ", ".join(f"{c['position']} {c['label']}".strip() for c in row["checkpoints"])
            lines.append(f"row {r}       {row['length']} tokens; checkpoints at {marks or 'none'}")
        print("\n".join(lines))
        return
    held = (f"{found['pieces']} pieces", f"{found['checkpoints']} checkpoints", f"{len(found['texts'])} texts")
    print(f"{place}: a prompt store, {human_bytes(found['bytes'])} and an index of {human_bytes(found['index_bytes'])}")
    print(", ".join(held))
    table = _table("model", "texts", "tokens of the longest", "weights", "dtype", "storage", "salt")
    for space in found["spaces"]:
        texts = [t["tokens"] for t in found["texts"] if t["space"] == space["id"]]
        whose = (space["identity"], space["dtype"], space["storage"], space["salt"] or "none")
        table.add_row(space["model"] or space["family"], str(len(texts)), str(max(texts, default=0)), *whose)
    _print(table, "")


@cache.command(name="prune")
def prune(
    directory: Directory,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", show_default=False, help="Keep at most so much, such as 500MB.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", show_default=False, help="Drop what was not used for, such as, 7d or 12h."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Drop all.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Make a prompt store smaller; what was used longest ago goes first."""
    if max_bytes is None and older_than is None and not everything:
        raise typer.BadParameter("nothing to prune by; give --max-bytes, --older-than or --all")
    most = 0 if everything else size_of(max_bytes, "--max-bytes") if max_bytes is not None else None
    before = None if older_than is None else time.time() - _seconds(older_than)
    from exactkv.cache.report import human_bytes
    from exactkv.cache.store.disk import DiskTier
    from exactkv.cache.store.trouble import told

    with told(directory):
        disk = DiskTier(directory, create=False)
        try:
            entries, freed = disk.prune(most, before, dry_run)
            left = disk.index.total() - (freed if dry_run else 0)
        finally:
            disk.close()
    if as_json:
        print_json({"entries": entries, "bytes": freed, "left": left, "dry_run": dry_run})
        return
    verb = "would go" if dry_run else "went"
    stays = f"{human_bytes(left)} {'would be ' * dry_run}left"
    print(f"{entries} pieces and checkpoints {verb}, {human_bytes(freed)}; {stays}")


@cache.command(name="verify")
def verify(
    place: Place, as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only what is broken.")] = False,
) -> None:  # fmt: skip
    """Read a prompt store or a saved cache whole and compare every checksum.

    Exit code 0: whole; 1: something is broken; 2: it could not be read.
    """
    found = _verify_directory(place, quiet) if place.is_dir() else _verify_file(place)
    if as_json:
        print_json(found)
    else:
        for kind in ("broken", "unreadable"):
            for one in found[kind]:
                print(f"{kind}: {one['file']}: {one['what']}")
        if not quiet:
            from exactkv.cache.report import human_bytes

            word = "broken" if found["broken"] else "not all could be read" if found["unreadable"] else "whole"
            print(f"{place}: {word}; {found['files']} files, {human_bytes(found['bytes'])} read")
    raise typer.Exit(BROKEN if found["broken"] else COULD_NOT_RUN if found["unreadable"] else WHOLE)


def _verify_directory(place: Path, quiet: bool) -> dict[str, Any]:
    from exactkv.cache.store.inspect import verify_store

    if quiet or not sys.stderr.isatty():
        return verify_store(place)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading")
        return verify_store(place, lambda done, total: bar.update(task, completed=done, total=max(1, total)))


def _verify_file(place: Path) -> dict[str, Any]:
    from exactkv.cache import container

    found: dict[str, Any] = {"file": str(place), "files": 1, "bytes": 0, "broken": [], "unreadable": []}
    if not place.exists():
        raise LoadError(f"{place} does not exist; give a prompt store's directory, or a saved cache")
    try:
        container.read(place)
        found["bytes"] = place.stat().st_size
    except LoadError as error:
        if isinstance(error.__cause__, OSError):
            raise
        found["broken"].append({"file": str(place), "what": str(error)})
    return found


def _saved(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The saved caches in a directory, from their headers, and what is none but seems to have been one."""
    from exactkv.cache import describe_file
    from exactkv.cache.container import NoneOfOurs

    found: list[dict[str, Any]] = []
    broken: list[dict[str, Any]] = []
    for path in sorted(directory.iterdir()):
        if path.is_file() and not path.name.startswith((".", "index.sqlite")):
            try:
                found.append(describe_file(path))
            except NoneOfOurs:
                continue
            except LoadError as error:
                broken.append({"file": str(path), "what": str(error)})
    return found, broken


def _space(space: dict[str, Any]) -> str:
    named = space["model"] or space["family"] or space["identity"]
    return f"{named} {space['dtype']}" + (f" salt {space['salt'][:6]}" if space["salt"] else "")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"--older-than is {text!r}; expected an age such as 30m, 12h, 7d or 2w")
    return float(match[1]) * AGES[match[2]]


def _age(used: float) -> str:
    seconds = max(0.0, time.time() - used)
    for unit, size in reversed(AGES.items()):
        if seconds >= 2 * size or unit == "s":
            return f"{seconds / size:.0f} {unit} ago"
    raise AssertionError


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _print(table: Table, line: str) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    if line:
        console.print(line)
