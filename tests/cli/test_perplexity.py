"""Perplexity in windows is what plain forward passes over the same windows say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from exactkv.cli.main import app
from exactkv.errors import InputError
from exactkv.generation import perplexity
from exactkv.models.load import load
from tests.generation.tiny_text import byte_tokenizer, text_model

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 3


def run(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(app, ["perplexity", *map(str, arguments)], **options)


def plain(model: Any, ids: list[int], window: int, stride: int) -> list[float]:
    """-log p of each token but the first, by the definition: of the windows that may score a token the first one."""
    found = []
    for at in range(1, len(ids)):
        begin = next(b for b in range(0, len(ids), stride) if at < b + window)
        logits = model([ids[begin:at]])[0, -1].double()
        found.append(-float(torch.log_softmax(logits, -1)[ids[at]]))
    return found


@pytest.mark.parametrize(("window", "stride"), [(16, 4), (16, 15), (7, 1), (2, 1), (50, 20), (64, 32), (2048, 1024)])
def test_it_is_the_definition(window: int, stride: int) -> None:
    model = text_model(tokenizer=byte_tokenizer())
    ids = model.tokenizer.encode("The quick brown fox jumps over the lazy dog, twice.")  # type: ignore[union-attr]
    expected = torch.tensor(plain(model, ids, window, stride), dtype=torch.float64)
    seen = []
    found = perplexity(model, ids, window, stride, lambda done, total: seen.append((done, total)))
    assert found.scored == len(ids) - 1 == len(expected) and seen[-1] == (len(ids) - 1, len(ids) - 1)
    assert found.nats == pytest.approx(float(expected.sum()), rel=1e-12)
    assert found.deviation == pytest.approx(float(expected.std()), rel=1e-9)
    mean = float(expected.mean())
    assert found.perplexity == pytest.approx(math.exp(mean))
    assert found.bits_per_token == pytest.approx(mean / math.log(2))
    assert found.standard_error == pytest.approx(math.exp(mean) * float(expected.std()) / math.sqrt(len(expected)))
    assert found.bits_per(10) == pytest.approx(float(expected.sum()) / math.log(2) / 10)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few logits are held at once; and no more are."""
    import exactkv.generation.perplexity  # noqa: F401 (the name below is the function's)

    model = text_model(tokenizer=byte_tokenizer())
    ids = list(range(1, 120))
    whole = perplexity(model, ids, 64, 16)
    for name, value in (("PREFILL_WIDTH", 5), ("LOGITS_AT_ONCE", 3 * 264), ("ROWS_AT_ONCE", 2 * 264)):
        monkeypatch.setitem(perplexity.__globals__, name, value)
    widths = []
    original = type(model).__call__

    def counted(self: Any, tokens: Any, **options: Any) -> Any:
        out = original(self, tokens, **options)
        widths.append((len(tokens[0]), 0 if out is None else out.shape[1]))
        return out

    monkeypatch.setattr(type(model), "__call__", counted)
    cut = perplexity(model, ids, 64, 16)
    assert cut.nats == pytest.approx(whole.nats, rel=1e-12)
    assert max(width for width, _ in widths) == 5 and max(made for _, made in widths) == 3
    assert sum(width for width, _ in widths) == cut.fed == whole.fed


def test_it_is_hugging_faces_recipe(model_dir: Path) -> None:
    """The code of "Perplexity of fixed-length models", its loss summed rather than averaged."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = load(model_dir)
    ids = model.tokenizer.encode(TEXT)  # type: ignore[union-attr]
    window, stride = 48, 20
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        given = torch.tensor([ids[begin:end]])
        target = given.clone()
        target[:, : -(end - previous)] = -100
        with torch.no_grad():
            loss = float(theirs(given, labels=target).loss)
        scored = int((target[:, 1:] != -100).sum())
        total, count, previous = total + loss * scored, count + scored, end
        if end == len(ids):
            break
    found = perplexity(model, ids, window, stride)
    assert (found.scored, found.nats) == (count, pytest.approx(total, rel=1e-5))


def test_the_command(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    model = load(model_dir)
    ids = model.tokenizer.encode(TEXT)  # type: ignore[union-attr]
    expected = perplexity(model, ids, 64, 16)
    result = run(model_dir, file, "--window", 64, "--stride", 16)
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout.startswith(f"perplexity {expected.perplexity:.4f} ± {expected.standard_error:.4f}\n")
    assert "bits a byte" in result.stdout and "tokens/s" in result.stdout
    found = json.loads(run(model_dir, "-", "--window", 64, "--stride", 16, "--json", input=TEXT).stdout)
    assert found["nats"] == expected.nats and found["perplexity"] == expected.perplexity
    assert (found["tokens"], found["scored_tokens"]) == (len(ids), len(ids) - 1)
    assert found["bytes"] == len(TEXT.encode())  # the first token is bos, which stands for none
    assert found["bits_per_byte"] == pytest.approx(found["bits_per_token"] * (len(ids) - 1) / found["bytes"])
    assert (found["window"], found["stride"], found["fed_tokens"]) == (64, 16, expected.fed)
    few = json.loads(run(model_dir, file, "--max-tokens", 9, "--json").stdout)
    assert (few["tokens"], few["bytes"], few["window"], few["stride"]) == (9, len("Zwölf B".encode()), 2048, 1024)
    wide = json.loads(run(model_dir, file, "--dtype", "float64", "--json").stdout)
    assert wide["dtype"] == "float64" and wide["nats"] == pytest.approx(perplexity(model, ids).nats, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        ([], b"", "standard input is empty; expected a text"),
        ([], b"ab\xff", "standard input is not valid UTF-8: invalid start byte at byte 2"),
        (["--window", "4096"], b"some text", "window is 4096; expected an integer from 2 to 2048: the model's limit"),
        (["--window", "8", "--stride", "8"], b"some text", "stride is 8; expected an integer from 1 to 7"),
        (["--window", "1"], b"some text", "'--window'"),
        (["--stride", "0"], b"some text", "'--stride'"),
        (["--max-tokens", "1"], b"some text", "'--max-tokens'"),
    ],
)
def test_errors_are_a_message(arguments: list[str], given: bytes, said: str, model_dir: Path) -> None:
    result = run(model_dir, "-", *arguments, input=given)
    assert result.exit_code == 2 and said in result.stderr
    assert "Traceback" not in result.output and result.stdout == ""


def test_more_errors(model_dir: Path, tmp_path: Path) -> None:
    assert "nothing.txt cannot be read: No such file" in run(model_dir, tmp_path / "nothing.txt").stderr
    model = text_model()
    with pytest.raises(InputError, match="the text has one token; expected at least two"):
        perplexity(model, [5])
    model.decoder.weights["norm" if "norm" in model.decoder.weights else next(iter(model.decoder.weights))].fill_(
        math.nan
    )
    with pytest.raises(InputError, match="token 1 is not a number above 0; its logits hold NaN"):
        perplexity(model, [5, 6, 7])
