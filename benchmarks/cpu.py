"""Decode and prefill on the CPU beside transformers (DynamicCache, sdpa), on the same weights in the same run.

    python benchmarks/cpu.py [--models smollm2 gemma3] [--dtypes bfloat16 float32] [--rounds 5] [--json]

The two take turns; the ratio of a round compares neighbours in time, and the median of the ratios is printed, since
machines drift. Before timing, both models' logits are compared, so that nothing is measured that is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

import exactkv  # noqa: E402
from exactkv.models import embedded  # noqa: E402
from exactkv.models.gguf import GGUFSource  # noqa: E402

DECODED = 48
PROMPT = 64
PREFILLS = (512, 2048)


def transformers_model(path: Path, dtype: torch.dtype) -> Any:
    """The file's weights in transformers' own class."""
    import transformers

    source = GGUFSource(path)
    fields = dict(source.config)
    kinds = {"llama": "Llama", "gemma3_text": "Gemma3Text"}
    kind = kinds[fields.pop("model_type")]
    fields["rope_theta"] = float(fields["rope_theta"])
    config = getattr(transformers, f"{kind}Config")(**fields)
    if kind == "Gemma3Text":
        config.rope_parameters["full_attention"]["rope_theta"] = fields["rope_theta"]
    else:
        config.rope_parameters["rope_theta"] = fields["rope_theta"]
    config._attn_implementation = "sdpa"
    name = "LlamaForCausalLM" if kind == "Llama" else "Gemma3ForCausalLM"
    model = getattr(transformers, name)(config).to(dtype).eval()
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for tensor in source.shapes():
            source.read(tensor, parameters[tensor])
    return model


def ours(model: exactkv.Model) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]:
    """(prefill a prompt and return the last logits, one greedy step) with a state shared by the two."""
    state: dict[str, Any] = {}

    def prefill(ids: torch.Tensor) -> torch.Tensor:
        state["cache"] = model.new_cache()
        logits = model(ids, cache=state["cache"], logits="last")
        state["next"] = int(logits[0].argmax())
        return logits[0]

    def step() -> None:
        logits = model([[state["next"]]], cache=state["cache"], logits="last")
        state["next"] = int(logits[0].argmax())

    return prefill, step


def theirs(model: Any) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]:
    """The same with transformers, called as its own generate does."""
    from transformers import DynamicCache

    state: dict[str, Any] = {}

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            out = model(ids, past_key_values=state["cache"], use_cache=True, logits_to_keep=1)
        state["next"] = int(out.logits[0, -1].argmax())
        return out.logits[0, -1]

    def prefill(ids: torch.Tensor) -> torch.Tensor:
        state["cache"] = DynamicCache(config=model.config)
        return forward(ids)

    def step() -> None:
        forward(torch.tensor([[state["next"]]]))

    return prefill, step


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(name: str, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    path = embedded.find(name)
    pairs = (ours(exactkv.load(path, dtype=dtype, device="cpu")), theirs(transformers_model(path, dtype)))
    vocabulary = 40_000
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, max(PREFILLS)), generator=generator)
    logits = [prefill(ids[:, :PROMPT]).float() for prefill, _ in pairs]
    difference = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
    assert difference < (1e-4 if dtype == torch.float32 else 0.2), f"not the same model: {difference}"

    def decode(pair: int) -> float:
        prefill, step = pairs[pair]
        prefill(ids[:, :PROMPT])
        step()
        return DECODED / seconds(lambda: [step() for _ in range(DECODED)])

    def fill(pair: int, width: int) -> float:
        return width / seconds(lambda: pairs[pair][0](ids[:, :width]))

    works = {"decode": decode} | {f"prefill {n}": (lambda pair, n=n: fill(pair, n)) for n in PREFILLS}
    rows = []
    for what, work in works.items():
        work(0), work(1)  # warm up
        rates = [(work(0), work(1)) for _ in range(rounds)]
        ratios = [a / b for a, b in rates]
        rows.append(
            {
                "model": name,
                "dtype": str(dtype).removeprefix("torch."),
                "what": what,
                "exactkv_tokens_per_s": statistics.median(a for a, _ in rates),
                "transformers_tokens_per_s": statistics.median(b for _, b in rates),
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
                "logits_difference": difference,
            }
        )
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    low, high = row["ratio_range"]
    print(
        f"{row['model']:9}{row['dtype']:10}{row['what']:13}{row['exactkv_tokens_per_s']:9.1f}"
        f"{row['transformers_tokens_per_s']:14.1f}{row['ratio']:8.2f}   {low:.2f} to {high:.2f}",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON on standard output")
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}", file=sys.stderr)
    print(f"{'model':9}{'dtype':10}{'what':13}{'exactkv':>9}{'transformers':>14}{'ratio':>8}   range", file=sys.stderr)
    rows = [
        row
        for name in args.models
        for dtype in args.dtypes
        for row in compare(name, getattr(torch, dtype), args.rounds)
    ]
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
