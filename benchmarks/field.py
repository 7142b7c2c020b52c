"""Field report: `exactkv verify` over many architectures, in transformers and in mlx-lm, as docs/field.md.

    python benchmarks/field.py --results DIR --run transformers=PYTHON --run mlx=PYTHON [--run mlx=OLDER_PYTHON]
    python benchmarks/field.py --results DIR --markdown > table

Each --run names an engine and a Python that has it (an environment with numpy, typer and rich beside it).
What has been run is in DIR, a JSON file each, and is not run again: the report can be resumed at any time.
Configs are those of transformers' own config classes, which are mostly the real models' shapes; the verifier makes
tiny models of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
TIMEOUT = 420

ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 3": ("llama", "LlamaForCausalLM", {"num_key_value_heads": 8}),
    "Mistral": ("mistral", "MistralForCausalLM", {}),
    "Qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "Qwen3": ("qwen3", "Qwen3ForCausalLM", {}),
    "Qwen3-MoE": ("qwen3_moe", "Qwen3MoeForCausalLM", {}),
    "Gemma 2": ("gemma2", "Gemma2ForCausalLM", {}),
    "Gemma 3": ("gemma3_text", "Gemma3ForCausalLM", {}),
    "Gemma 3n": ("gemma3n_text", "Gemma3nForCausalLM", {}),
    "Llama 4": ("llama4", "Llama4ForConditionalGeneration", {}),
    "Phi-3, long rope": (
        "phi3",
        "Phi3ForCausalLM",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.01 * i for i in range(48)],
                "long_factor": [1.0 + 0.4 * i for i in range(48)],
            },
        },
    ),
    "Cohere2": ("cohere2", "Cohere2ForCausalLM", {}),
    "OLMo 2": ("olmo2", "Olmo2ForCausalLM", {}),
    "OLMo 3": ("olmo3", "Olmo3ForCausalLM", {}),
    "SmolLM3": ("smollm3", "SmolLM3ForCausalLM", {}),
    "EXAONE 4": ("exaone4", "Exaone4ForCausalLM", {}),
    "Granite 4 hybrid": (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {"num_hidden_layers": 12, "layer_types": (["mamba"] * 5 + ["attention"]) * 2},
    ),
    "GPT-OSS": ("gpt_oss", "GptOssForCausalLM", {}),
    "DeepSeek V3": ("deepseek_v3", "DeepseekV3ForCausalLM", {}),
    "GLM-4-MoE": ("glm4_moe", "Glm4MoeForCausalLM", {}),
    "Mamba": ("mamba", "MambaForCausalLM", {}),
    "Mamba-2": ("mamba2", "Mamba2ForCausalLM", {}),
    "Falcon-H1": ("falcon_h1", "FalconH1ForCausalLM", {}),
    "Jamba": ("jamba", "JambaForCausalLM", {}),
    "LFM2": (
        "lfm2",
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2},
    ),
    "Qwen3-Next": ("qwen3_next", "Qwen3NextForCausalLM", {}),
    "RecurrentGemma": ("recurrent_gemma", "RecurrentGemmaForCausalLM", {}),
    "GPT-2": ("gpt2", "GPT2LMHeadModel", {}),
}
"""Name: model type, class, and what differs from the config class's defaults."""

GROUPS = {
    "one pass": ("one pass", "visibility"),
    "feeding": ("steps", "one feed", "prefill then decode", "pieces", "random pieces", "warm pieces", "positions"),
    "memory": ("allocation", "long", "capacity"),
    "rewind": ("rewind", "prepared rewind", "draft rounds"),
    "fork, reset": ("fork", "two caches", "reset"),
    "files": ("save and load", "new process", "damaged files"),
    "batches": (
        "batch", "ragged batch", "ragged pieces", "empty rows", "leaving rows", "joining rows", "extracted rows",
        "rewound rows",
    ),
    "prefix store": ("prefix store", "prefix reuse", "random prefixes", "owners"),
    "generation": ("generate", "caps", "closed streams", "stops", "requests"),
    "quantized": ("quantized:",),
}  # fmt: skip
"""Columns of the table, and the schedules in each."""


def config(name: str) -> dict[str, Any]:
    """The config that stands for an architecture (needs transformers)."""
    from transformers import AutoConfig

    model_type, architecture, changes = ARCHITECTURES[name]
    return {**AutoConfig.for_model(model_type, **changes).to_dict(), "architectures": [architecture]}


def run_one(engine: str, python: str, version: str, name: str, fields: dict[str, Any], results: Path) -> str:
    """Verify one architecture; returns a line about it."""
    out = results / f"{engine}-{version}-{name.replace(' ', '_')}.json"
    if out.exists():
        return f"{engine} {version}, {name}: there already"
    path = results / f"{name.replace(' ', '_')}.config.json"
    path.write_text(json.dumps(fields))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "exactkv", "verify", str(path), "--engine", engine, "--json"]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, cwd=results, check=False
        )
    except subprocess.TimeoutExpired:
        record = {"could_not_run": f"no answer within {TIMEOUT} s"}
    else:
        try:
            record = json.loads(done.stdout)
        except ValueError:
            record = {"could_not_run": (done.stderr.strip().splitlines() or ["no output"])[-1][:400]}
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(record))
    temporary.rename(out)
    said = record.get("could_not_run") or f"{len([o for o in record['outcomes'] if o['status'] == 'violation'])} found"
    return f"{engine} {version}, {name}: {said} ({time.monotonic() - started:.0f} s)"


def version_of(engine: str, python: str) -> str:
    package = {"transformers": "transformers", "mlx": "mlx-lm", "exactkv": "torch"}[engine]
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def cell(outcomes: list[dict[str, Any]]) -> str:
    """What a group of schedules came to: the letters of what was found, "exact", or "–" for not supported."""
    found = sorted({o["diagnosis"]["kind"] for o in outcomes if o["status"] == "violation" and o["diagnosis"]})
    if found:
        return "**" + " ".join(found) + "**"
    statuses = {o["status"] for o in outcomes}
    if "undecided" in statuses:
        return "?"
    return "exact" if "exact" in statuses else "–"


def table(results: Path) -> str:
    """Architecture by group of schedules, a table an engine and version."""
    files = sorted(f for f in results.glob("*.json") if not f.name.endswith(".config.json"))
    by_run: dict[str, dict[str, dict[str, Any]]] = {}
    for file in files:
        engine, version, name = file.stem.split("-", 2)
        by_run.setdefault(f"{engine} {version}", {})[name.replace("_", " ")] = json.loads(file.read_text())
    lines = []
    for run, records in by_run.items():
        lines += [f"### {run}", "", "| architecture | " + " | ".join(GROUPS) + " |", "|---" * (len(GROUPS) + 1) + "|"]
        for name in ARCHITECTURES:
            record = records.get(name)
            if record is None:
                continue
            if "could_not_run" in record:
                lines.append(f"| {name} | could not run: {record['could_not_run'][:90]} |" + " |" * (len(GROUPS) - 1))
                continue
            cells = []
            for schedules in GROUPS.values():
                in_group = [o for o in record["outcomes"] if o["schedule"].startswith(schedules)]
                cells.append(cell(in_group) if in_group else "–")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--run", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--only", action="append", help="an architecture; may be given several times")
    parser.add_argument("--markdown", action="store_true", help="print the tables of what has been run")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    names = given.only or list(ARCHITECTURES)
    jobs = []
    for item in given.run:
        engine, _, python = item.partition("=")
        version = version_of(engine, python)
        jobs += [(engine, python, version, name, config(name), given.results.resolve()) for name in names]
    with ThreadPoolExecutor(2) as pool:
        for number, line in enumerate(pool.map(lambda job: run_one(*job), jobs), 1):
            print(f"{number}/{len(jobs)} {line}", file=sys.stderr, flush=True)
    if given.markdown:
        print(table(given.results))


if __name__ == "__main__":
    main()
