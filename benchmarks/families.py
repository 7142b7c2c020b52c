"""Every family's judges in one table: the oracle (transformers, same weights) and `exactkv verify`, all schedules.

    python benchmarks/families.py [--results FILE] [--markdown] [NAME ...]

A line for each case of the oracle tests: a tiny random model saved by transformers and loaded by exactkv. "difference"
is the largest of the logits against one forward pass of transformers (float32, eager), relative to the largest logit;
"schedules" are how many of verify's were exact, found wrong, and not supported. Lines of code are those of the
family's file. All take about eight minutes on one core; with --results it can be resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import exactkv  # noqa: E402
from exactkv.models.families import find_family  # noqa: E402
from exactkv.verify.targets.exactkv import ExactKVTarget  # noqa: E402
from tests.models.cases import CASES  # noqa: E402
from tests.models.cases_dense import DENSE  # noqa: E402
from tests.models.cases_mixtures import MIXTURES  # noqa: E402
from tests.models.oracle import Case, build, difference, oracle_logits, tokens  # noqa: E402
from tests.models.test_recurrent_oracle import CASES as RECURRENT  # noqa: E402
from tests.models.test_recurrent_oracle import built  # noqa: E402

FAMILIES = ROOT / "src" / "exactkv" / "models" / "families"


def judged(case: Case, recurrent: bool) -> dict[str, Any]:
    """One case before both judges."""
    oracle = built(case) if recurrent else build(case)
    with tempfile.TemporaryDirectory() as directory:
        oracle.save_pretrained(directory)
        model = exactkv.load(directory, dtype="float32", device="cpu", progress=False)
        config = json.loads((Path(directory) / "config.json").read_text())
        family = find_family(config)
    texts = [tokens(2, length) for length in case.lengths]
    worst = max(difference(model(ids, max_length=ids.shape[1]), oracle_logits(oracle, ids)) for ids in texts)
    started = time.perf_counter()
    report = exactkv.verify(ExactKVTarget(model))
    count = dict.fromkeys(("exact", "violation", "not supported", "undecided"), 0)
    for outcome in report.outcomes:
        count[str(outcome.status)] += 1
    return {
        "case": case.name,
        "family": family.name,
        "lines": len((FAMILIES / (family.spec.__module__.rsplit(".", 1)[1] + ".py")).read_text().splitlines()),
        "difference": worst,
        "exact": count["exact"],
        "violations": [o.schedule for o in report.outcomes if str(o.status) == "violation"],
        "undecided": [o.schedule for o in report.outcomes if str(o.status) == "undecided"],
        "not_supported": count["not supported"],
        "seconds": time.perf_counter() - started,
    }


def family_table(rows: list[dict[str, Any]]) -> str:
    """A line a family, for docs/families.md."""
    lines = [
        "| family | lines | configurations | largest difference | schedules exact | wrong | not supported |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        wrong = sum(len(row["violations"]) + len(row["undecided"]) for row in mine)
        exact = min(row["exact"] for row in mine)
        lines.append(
            f"| {family} | {mine[0]['lines']} | {len(mine)}: {', '.join(row['case'] for row in mine)} | "
            f"{max(row['difference'] for row in mine):.1e} | {exact} | {wrong} | "
            f"{max(row['not_supported'] for row in mine)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases; default: all")
    parser.add_argument("--results", type=Path, help="a file of JSON lines; cases that are in it are not run again")
    parser.add_argument("--markdown", action="store_true", help="a table of families at the end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(case, False) for case in (*CASES, *DENSE, *MIXTURES)] + [(case, True) for case in RECURRENT]
    results: Path | None = arguments.results
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results and results.exists() else []
    done = {row["case"] for row in rows}
    chosen = [(case, recurrent) for case, recurrent in cases if not arguments.names or case.name in arguments.names]
    for n, (case, recurrent) in enumerate(chosen, 1):
        if case.name in done:
            continue
        row = judged(case, recurrent)
        rows.append(row)
        if results:
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        wrong = ", ".join([*row["violations"], *(f"{name} (undecided)" for name in row["undecided"])]) or "none"
        print(
            f"{n}/{len(chosen)} {row['family']}, {row['case']}: difference {row['difference']:.1e}; schedules "
            f"{row['exact']} exact, wrong: {wrong}; {row['seconds']:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    if arguments.markdown:
        order = [case.name for case, _ in cases]
        print(family_table(sorted((r for r in rows if r["case"] in order), key=lambda r: order.index(r["case"]))))


if __name__ == "__main__":
    main()
