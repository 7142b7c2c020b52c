"""The adapter to lm-eval against lm-eval's own transformers model, on the same weights."""

# ruff: noqa: E402 (what is not installed must be skipped before it is imported)

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("lm_eval", "accelerate", "transformers"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'exactkv[eval]' accelerate")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from exactkv.errors import InputError
from exactkv.integrations.lm_eval import ExactKVLM
from tests.cli.conftest import write_model

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = write_model(tmp_path_factory.mktemp("evaluated"), TEMPLATE)
    config = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}))
    content = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**content, "max_position_embeddings": 128}))
    return place


@pytest.fixture(scope="module")
def ours(directory: Path) -> ExactKVLM:
    return ExactKVLM(str(directory), batch_size=3, device="cpu")


@pytest.fixture(scope="module")
def theirs(directory: Path) -> HFLM:
    return HFLM(pretrained=str(directory), batch_size=3, device="cpu", dtype="float32")


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


SHOTS = "Question: one and one? Answer: two.\n" * 2
PAIRS = [
    (SHOTS + f"Question: {q}? Answer:", a) for q in ("two and two", "a", "") for a in (" four", " five hundred", " f")
] + [("", "empty context"), ("ends in space ", "word"), ("é日", "本語"), ("x" * 300, "left is cut"), ("x", "y" * 100)]


def test_log_likelihoods_are_theirs(ours: ExactKVLM, theirs: HFLM) -> None:
    mine = ours.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    other = theirs.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    for (value, greedy), (expected, its) in zip(mine, other, strict=True):
        assert value == pytest.approx(expected, rel=1e-5, abs=1e-4) and greedy == its


def test_rolling_log_likelihoods_are_theirs(ours: ExactKVLM, theirs: HFLM) -> None:
    texts = [("short",), ("A text that is longer than the model can take. " * 9,), ("é" * 70,)]
    mine = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts), disable_tqdm=True)
    other = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts), disable_tqdm=True)
    assert mine == pytest.approx(other, rel=1e-5)
    assert len(set(mine)) == 3


def test_generations_are_theirs(ours: ExactKVLM, theirs: HFLM) -> None:
    contexts = [SHOTS + "Question: a?", "x", "é日本", "y" * 300, SHOTS + "Question: b?"]
    free = [(c, {"until": ["\n\n\n"], "max_gen_toks": 24, "do_sample": False}) for c in contexts]
    said = theirs.generate_until(requests("generate_until", free), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", free), disable_tqdm=True) == said
    assert all(said)
    stops = [
        (c, {"until": [text[5:7], text[9:10]], "max_gen_toks": 24}) for c, text in zip(contexts, said, strict=True)
    ]
    cut = theirs.generate_until(requests("generate_until", stops), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", stops), disable_tqdm=True) == cut
    assert all(len(short) < len(whole) for short, whole in zip(cut, said, strict=True))
    penal = [(c, {"until": [], "max_gen_toks": 9, "repetition_penalty": 1.3}) for c in contexts]
    assert ours.generate_until(requests("generate_until", penal), disable_tqdm=True) == theirs.generate_until(
        requests("generate_until", penal), disable_tqdm=True
    )


def test_conversations_are_written_as_theirs(ours: ExactKVLM, theirs: HFLM) -> None:
    history = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    prefilled = [*history, {"role": "assistant", "content": "The answer is"}]
    assert ours.apply_chat_template(history) == theirs.apply_chat_template(history)
    assert ours.apply_chat_template(prefilled, False) == theirs.apply_chat_template(prefilled, False)
    assert ours.chat_template(True) == TEMPLATE and ours.tokenizer_name
    for text in ("<bos>begun already", "not", ""):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(text, add_special_tokens=False)


def test_samples_of_one_request_differ_and_come_again(ours: ExactKVLM) -> None:
    asked = [("x", {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_p": 0.9})] * 3
    first = ours.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert len(set(first)) == 3
    assert ours.generate_until(requests("generate_until", asked), disable_tqdm=True) == first


def test_what_does_not_fit_is_refused(ours: ExactKVLM, directory: Path) -> None:
    with pytest.raises(InputError, match="num_beams=4"):
        ours.generate_until(requests("generate_until", [("x", {"until": [], "num_beams": 4})]))
    with pytest.raises(InputError, match="room for 128"):
        ours.generate_until(requests("generate_until", [("x", {"until": [], "max_gen_toks": 128})]))
    with pytest.raises(InputError, match="no argument peft"):
        ExactKVLM(str(directory), peft="x")
    with pytest.raises(InputError, match="batch_size is 'many'"):
        ExactKVLM(ours.model, batch_size="many")
    assert get_model("exactkv") is ExactKVLM


@pytest.mark.slow
def test_the_command_evaluates_a_local_task(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(
        "\n".join(json.dumps({"q": q, "choices": ["yes", "no"], "label": i % 2}) for i, q in enumerate("abcd"))
    )
    task = f"""
task: tiny
dataset_path: json
dataset_kwargs:
  data_files:
    test: {tmp_path / "data.json"}
test_split: test
output_type: multiple_choice
doc_to_text: "Q {{{{q}}}}:"
doc_to_target: label
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
"""
    (tmp_path / "tiny.yaml").write_text(task)
    offline = {"HF_DATASETS_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **offline}
    found = {}
    for model in ("exactkv", "hf"):
        done = subprocess.run(
            [sys.executable, "-m", "exactkv.integrations.lm_eval", "run", "--model", model, "--model_args",
             f"pretrained={directory},dtype=float32", "--tasks", "tiny", "--include_path", str(tmp_path),
             "--output_path", str(tmp_path / model), "--device", "cpu", "--batch_size", "2"],
            capture_output=True, text=True, env=environment, timeout=280, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        (file,) = (tmp_path / model).rglob("results*.json")
        found[model] = json.loads(file.read_text())["results"]["tiny"]["acc,none"]
    assert found["exactkv"] == found["hf"]
