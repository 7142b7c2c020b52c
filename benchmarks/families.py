"""Every family's judges in one table: the oracle (transformers, same weights) and `exactkv verify`, all schedules.

    python benchmarks/families.py [--markdown] [--json] [NAME ...]

A line for each case of the oracle tests: a tiny random model saved by transformers and loaded by exactkv. "difference"
is the largest of the logits against one forward pass of transformers (float32, eager), relative to the largest logit;
"schedules" are how many of verify's were exact, found wrong, and not supported. Lines of code are those of the
family's file. It takes about six minutes on one core.
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
    worst = max(difference(model(ids), oracle_logits(oracle, ids)) for ids in (tokens(2, n) for n in case.lengths))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases; default: all")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    parser.add_argument("--markdown", action="store_true", help="a table for the docs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(case, False) for case in (*CASES, *DENSE, *MIXTURES)] + [(case, True) for case in RECURRENT]
    chosen = [(case, r) for case, r in cases if not arguments.names or case.name in arguments.names]
    if arguments.markdown:
        print("| family | case | lines | difference to transformers | schedules exact | wrong | not supported |")
        print("|---|---|---|---|---|---|---|")
    for n, (case, recurrent) in enumerate(chosen, 1):
        print(f"{n}/{len(chosen)} {case.name} …", end="\r", file=sys.stderr, flush=True)
        row = judged(case, recurrent)
        wrong = ", ".join([*row["violations"], *(f"{name} (undecided)" for name in row["undecided"])]) or "0"
        cells = [row["family"], row["case"], row["lines"], f"{row['difference']:.1e}", row["exact"], wrong,
                 row["not_supported"]]  # fmt: skip
        if arguments.json:
            print(json.dumps(row), flush=True)
        else:
            print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
