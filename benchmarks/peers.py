"""exactkv beside transformers and gpt-fast: the same weights in one run, the sides taking turns.

    python benchmarks/peers.py MODEL [--contexts 512,2048] [--tokens 48] [--rounds 5] [--dtype bfloat16] [--json]
    python benchmarks/peers.py --shape llama-3.1-8b [--layers N] [--compile] [--gpt-fast DIR]

MODEL is what `exactkv.load` takes; with --shape, weights are random. The other engines' models are filled with
exactkv's weights, and their logits after the prompt compared with its own before anything is timed. A round is a
prefill of each context and --tokens greedy tokens after it, read by the host one by one, for each side in turn; a
ratio compares neighbours in time, and the median of the ratios is shown. "wait": from the first call to the first
token decoded at that context, compiling included. transformers runs its DynamicCache and the
attention that it chooses itself; --compile adds its
StaticCache under torch.compile (mode "reduce-overhead"). --gpt-fast DIR adds that checkout of gpt-fast, compiled on
CUDA, through its own `prefill` and `decode_n_tokens`; it takes Llama shapes only, and its tokens stay on the device
until the end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import exactkv  # noqa: E402
from exactkv.bench.machine import device_name, seconds  # noqa: E402
from exactkv.bench.measure import feed, random_prompt  # noqa: E402
from exactkv.models.families import find_family  # noqa: E402
from exactkv.models.load import as_device, as_dtype, locate, text_config  # noqa: E402
from exactkv.models.model import Model  # noqa: E402
from exactkv.models.plan import as_saved, plan_reading  # noqa: E402
from exactkv.models.random import random_weights  # noqa: E402
from exactkv.models.shapes import shape_config, shape_spec  # noqa: E402
from exactkv.models.source import read_json  # noqa: E402

PIECE = 512
BOUND = {torch.float32: 1e-3, torch.float64: 1e-3}
"""How far logits may differ, of the largest; in 16 bits BOUND_16."""
BOUND_16 = 0.2


class Side:
    """An engine at one context: ``prefill(ids)`` [1, T] -> logits [V] of the last token; then ``decode(count)``."""

    name: str

    def prefill(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def decode(self, count: int) -> None:
        raise NotImplementedError


class ExactKV(Side):
    name = "exactkv"

    def __init__(self, model: Model):
        self.model = model

    def prefill(self, ids: Tensor) -> Tensor:
        self.cache = self.model.new_cache()
        logits = feed(self.model, self.cache, ids, PIECE)
        assert logits is not None
        self.next = int(logits.argmax())
        return logits[0]

    def decode(self, count: int) -> None:
        for _ in range(count):
            logits = self.model([[self.next]], cache=self.cache, logits="last")
            assert logits is not None
            self.next = int(logits.argmax())


class Transformers(Side):
    """With a DynamicCache, or, ``compiled``, a StaticCache of ``rows`` whose steps are compiled."""

    def __init__(self, model: Any, rows: int, compiled: bool = False):
        self.model, self.rows, self.compiled = model, rows, compiled
        self.name = "transformers, compiled" if compiled else "transformers"
        self.cache: Any = None
        self.step = torch.compile(model.forward, mode="reduce-overhead") if compiled else model.forward

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Tensor:
        import transformers

        if not self.compiled:
            self.cache = transformers.DynamicCache(config=self.model.config)
        elif self.cache is None:
            self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=self.rows)
        else:
            self.cache.reset()
        self.position = 0
        for part in ids.to(self.model.device).split(PIECE, dim=1):
            out = self._call(self.model.forward, part)
        logits: Tensor = out.logits[0, -1]
        self.next = int(logits.argmax())
        return logits.clone()

    @torch.no_grad()
    def decode(self, count: int) -> None:
        for _ in range(count):
            out = self._call(self.step, torch.tensor([[self.next]], device=self.model.device))
            self.next = int(out.logits[0, -1].argmax())

    def _call(self, forward: Callable[..., Any], ids: Tensor) -> Any:
        positions = torch.arange(self.position, self.position + ids.shape[1], device=ids.device)[None]
        self.position += ids.shape[1]
        return forward(ids, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1)


class GptFast(Side):
    name = "gpt-fast"

    def __init__(self, generate: types.ModuleType, model: Any, rows: int, device: torch.device):
        self.generate, self.model, self.rows, self.device = generate, model, rows, device

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Tensor:
        with torch.device(self.device):
            self.model.setup_caches(max_batch_size=1, max_seq_length=self.rows)
        ids = ids.to(self.device)
        positions = torch.arange(ids.shape[1], device=self.device)
        logits: list[Tensor] = []
        hook = self.model.output.register_forward_hook(lambda _, __, out: logits.append(out[0, -1]))
        token = self.generate.prefill(self.model, ids, positions, temperature=0.0)
        hook.remove()
        self.next = token.clone().view(1, -1)
        self.position = torch.tensor([ids.shape[1]], device=self.device, dtype=torch.int)
        return logits[-1]

    @torch.no_grad()
    def decode(self, count: int) -> None:
        made, _ = self.generate.decode_n_tokens(self.model, self.next, self.position, count, temperature=0.0)
        self.next = made[-1].clone().view(1, -1)


class Filling:
    """A source of weights that runs backwards: what is read out of it is put into it."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors

    def read(self, name: str, out: Tensor) -> None:
        self.tensors[name].view(out.shape).copy_(out)


@torch.no_grad()
def transformers_model(config: dict[str, Any], model: Model) -> Any:
    """transformers' model of ``config`` with the weights of ``model``. Raises LoadError where it keeps them in
    memory under names or shapes other than those of its files."""
    import transformers

    fields = {**config, "torch_dtype": None}
    fields.pop("architectures", None)
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    if theta := fields.get("rope_theta"):  # of GGUF files; transformers reads it in rope_parameters only
        ropes = made.rope_parameters
        ropes.get("full_attention", ropes)["rope_theta"] = float(theta)
    with torch.device(model.device):
        peer = transformers.AutoModelForCausalLM.from_config(made, dtype=model.dtype).eval()
    tensors = peer.state_dict()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    family = as_saved(find_family(config), shapes)
    filling = Filling(tensors)
    for piece in plan_reading(family, model.spec, shapes, "transformers", lambda _: True):
        piece.fill(model.decoder.weights, filling)  # type: ignore[arg-type]
    return peer


def gpt_fast(directory: Path, config: dict[str, Any], model: Model) -> tuple[types.ModuleType, Any]:
    """The checkout's `generate` module, its step compiled on CUDA, and its model with the weights of ``model``."""
    sys.path.insert(0, str(directory))
    for needless in ("sentencepiece", "tokenizer"):  # what its generate.py imports to read text
        try:
            importlib.import_module(needless)
        except ImportError:
            stand_in = types.ModuleType(needless)
            stand_in.SentencePieceProcessor = stand_in.get_tokenizer = None  # type: ignore[attr-defined]
            sys.modules[needless] = stand_in
    theirs, generate = importlib.import_module("model"), importlib.import_module("generate")
    if config["model_type"] != "llama" or model.spec.tied_head:
        raise SystemExit("peers: gpt-fast takes Llama shapes with a head of their own; leave --gpt-fast out")
    fields = {
        "block_size": config["max_position_embeddings"], "vocab_size": config["vocab_size"],
        "n_layer": config["num_hidden_layers"], "n_head": config["num_attention_heads"],
        "n_local_heads": config["num_key_value_heads"], "dim": config["hidden_size"],
        "intermediate_size": config["intermediate_size"], "rope_base": config.get("rope_theta", 10000.0),
        "norm_eps": config["rms_norm_eps"],
    }  # fmt: skip
    if scaling := config.get("rope_scaling"):
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        fields["rope_scaling"] = {name: scaling[name] for name in names}
    with torch.device("meta"):
        made = theirs.Transformer(theirs.ModelArgs(**fields))
    made.load_state_dict(gpt_fast_weights(model), assign=True)
    if model.device.type == "cuda":
        generate.decode_one_token = torch.compile(  # type: ignore[attr-defined]
            generate.decode_one_token, mode="reduce-overhead", fullgraph=True
        )
    return generate, made.eval()


def gpt_fast_weights(model: Model) -> dict[str, Tensor]:
    """Our weights by its names; queries and keys in the order of its rope, whose pairs are neighbours."""
    held = model.decoder.weights
    found = {
        "tok_embeddings.weight": held["embedding.weight"],
        "norm.weight": held["final_norm.weight"],
        "output.weight": held["head.weight"],
    }
    for i, layer in enumerate(model.spec.layers):
        a, ours, name = layer.attention, f"layers.{i}", f"layers.{i}"
        heads, kv, size = a.num_heads, a.num_kv_heads, a.head_dim  # type: ignore[union-attr]
        qk, v = held[f"{ours}.attention.qkv.weight"].split([(heads + kv) * size, kv * size])
        turned = qk.view(heads + kv, 2, size // 2, -1).transpose(1, 2).reshape(qk.shape)
        gate, up = held[f"{ours}.mlp.gate_up.weight"].chunk(2)
        found |= {
            f"{name}.attention.wqkv.weight": torch.cat([turned, v]),
            f"{name}.attention.wo.weight": held[f"{ours}.attention.out.weight"],
            f"{name}.feed_forward.w1.weight": gate,
            f"{name}.feed_forward.w3.weight": up,
            f"{name}.feed_forward.w2.weight": held[f"{ours}.mlp.down.weight"],
            f"{name}.attention_norm.weight": held[f"{ours}.attention.norm.weight"],
            f"{name}.ffn_norm.weight": held[f"{ours}.mlp.norm.weight"],
        }
    return found


def compare(sides: list[Side], device: torch.device, vocabulary: int, context: int, count: int, rounds: int) -> Any:
    """One context: a dict a side and what it does, ratios to the first side's time."""
    prompt = random_prompt(1, context, vocabulary)
    waits, logits, difference = {}, {}, {}
    for side in sides:
        print(f"{side.name} at {context} …", file=sys.stderr, flush=True)

        def first(side: Side = side) -> None:
            logits[side.name] = side.prefill(prompt).float()
            side.decode(1)

        waits[side.name] = seconds(first, device)
        side.decode(count)
        difference[side.name] = float(
            (logits[side.name] - logits[sides[0].name]).abs().max() / logits[sides[0].name].abs().max()
        )
    taken: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            fill = seconds(lambda side=side: side.prefill(prompt), device)
            taken[side.name].append((fill, seconds(lambda side=side: side.decode(count), device)))
    rows = []
    for what, i, tokens in (("prefill", 0, context), ("decode", 1, count)):
        for side in sides:
            mine, ours = [t[i] for t in taken[side.name]], [t[i] for t in taken[sides[0].name]]
            ratios = [b / a for a, b in zip(ours, mine, strict=True)]
            rows.append({
                "what": what, "context": context, "side": side.name, "seconds": mine,
                "tokens_per_second": tokens / statistics.median(mine), "exactkv_faster_by": statistics.median(ratios),
                "range": [min(ratios), max(ratios)], "wait_seconds": waits[side.name],
                "logits_difference": difference[side.name],
            })  # fmt: skip
    return rows


def show(found: dict[str, Any]) -> None:
    """A line a side and what it did. "exactkv": how many times as fast as that side it was; "differs": its logits, of
    the largest."""
    print(f"{found['model']}, {found['dtype']}, {found['machine']}, torch {found['torch']}")
    print(f"{'':8}{'context':>9}  {'side':23}{'tokens/s':>10}{'exactkv':>9}  {'range':14}{'wait':>8}{'differs':>9}")
    for r in found["measurements"]:
        low, high = r["range"]
        print(
            f"{r['what']:8}{r['context']:>9,}  {r['side']:23}{r['tokens_per_second']:>10,.1f}"
            f"{r['exactkv_faster_by']:>8.2f}×  {f'{low:.2f} to {high:.2f}':14}{r['wait_seconds']:>6.1f} s"
            f"{r['logits_difference']:>9.0e}"
        )


def opened(options: argparse.Namespace) -> tuple[Model, dict[str, Any]]:
    """exactkv's model, and the config that describes it."""
    device, dtype = as_device(options.device), as_dtype(options.dtype)
    if options.shape is not None:
        spec = shape_spec(options.shape, options.layers)
        weights = random_weights(spec, dtype=dtype or torch.bfloat16, device=device)
        return Model(spec, weights, name=options.shape), shape_config(options.shape, options.layers)
    path, _ = locate(options.model)
    if path.is_dir():
        config = read_json(path / "config.json")
    else:
        from exactkv.models.gguf import GGUFSource

        config = dict(GGUFSource(path).config)
    return exactkv.load(path, device=device, dtype=options.dtype), text_config(config)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--contexts", default="512,2048")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpt-fast", type=Path, metavar="DIR")
    for flag in ("--compile", "--json"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if (options.model is None) == (options.shape is None):
        parser.error("give either MODEL or --shape")
    contexts = sorted(int(n) for n in options.contexts.split(","))
    model, config = opened(options)
    peer = transformers_model(config, model)
    checkout = None if options.gpt_fast is None else gpt_fast(options.gpt_fast.resolve(), config, model)
    found: list[dict[str, Any]] = []
    for context in contexts:
        rows = context + 2 * options.tokens + 8
        sides: list[Side] = [ExactKV(model), Transformers(peer, rows)]
        sides += [Transformers(peer, rows, compiled=True)] if options.compile else []
        sides += [GptFast(*checkout, rows, model.device)] if checkout else []
        found += compare(sides, model.device, model.spec.vocab_size, context, options.tokens, options.rounds)
        worst = max(r["logits_difference"] for r in found)
        if worst > BOUND.get(model.dtype, BOUND_16):
            print(f"peers: logits differ by {worst:.1e} of the largest; these are not the same model", file=sys.stderr)
            return 1
    told = {
        "model": model.name, "dtype": str(model.dtype).removeprefix("torch."), "torch": torch.__version__,
        "machine": device_name(model.device), "measurements": found,
    }  # fmt: skip
    if options.json:
        print(json.dumps(told, indent=2))
    else:
        show(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
