"""Options that several subcommands have."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL_FORMS = "A directory, a .gguf file, a hub id (org/name) or the name of an embedded model."

TopP = Annotated[float, typer.Option(help="Choose among the most probable tokens that reach this.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, or auto: the model's own.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto: cuda where there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
