"""`exactkv quantize`: a model with its weights rounded to a few bits, written as a directory that loads at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exactkv.cli.options import MODEL_FORMS, Device, Dtype
from exactkv.cli.output import print_json


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help=MODEL_FORMS)],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", show_default=False, help="The directory to write; it must not exist.")
    ],
    bits: Annotated[int, typer.Option(help="4 or 8. The head has 8 always.")] = 4,
    group: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBERS",
            show_default="32 for 4 bits, 128 for 8",
            help="Numbers of a row that share a scale: 32, 64, 128 or 256.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Round a model's weights to 4 or 8 bits and write them, with config and tokenizer, to a directory OUT.

    Every command takes OUT as its MODEL. Nothing is overwritten.
    """
    from exactkv.models.packed_files import refuse_existing
    from exactkv.models.packing import weight_format

    wanted = f"int{bits}" + ("" if group is None else f":{group}")
    weight_format(wanted)
    out = out.expanduser()
    refuse_existing(out)

    from exactkv.models.load import load_with_source
    from exactkv.models.packed_files import write

    loaded, source = load_with_source(model, device=device, dtype=dtype, quantize=wanted)
    write(loaded, source, out)
    before = sum(w.numel() for w in loaded.decoder.weights.values()) * loaded.dtype.itemsize
    if as_json:
        print_json(
            {
                "model": loaded.name,
                "out": str(out),
                "quantization": loaded.quantization,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "weights_bytes": loaded.nbytes,
                "weights_bytes_before": before,
                "fingerprint": loaded.fingerprint,
            }
        )
        return
    print(f"{out}: {loaded.quantization}, {loaded.nbytes / 1e6:.1f} MB of weights, {before / 1e6:.1f} MB before")
