"""Tokenizers: ids of the embedded models, vocabularies, streams of text."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from exactkv.errors import InputError, LoadError
from exactkv.models.gguf.splittings import SPLITTINGS
from exactkv.models.gguf.vocabulary import build_tokenizer
from exactkv.models.tokenizer import Tokenizer

# The ids below come from llama.cpp (xllamacpp 2026.10, /tokenize with add_special and parse_special), which
# defines GGUF's vocabularies. transformers 5.17 gives the same for SmolLM2, but for digits that are not
# ASCII: it splits with GPT-2's expression whatever tokenizer.ggml.pre says. For Gemma it builds a unigram
# model from scores that are BPE's, and cuts "world" into "wo", "r", "ld": it is no oracle there.
PROBES = [
    "Hello, world! It's a test, isn't it? They'll've we'd I'M",
    "Résumé naïve façade Ångström über straße ñandú İstanbul Œuvre",
    "日本語のテキスト 漢字かな交じり文。中文字符,测试。한국어 문장입니다",
    "السلام عليكم ورحمة الله وبركاته ١٢٣",
    "नमस्ते दुनिया, यह एक परीक्षण है १२३",
    "สวัสดีชาวโลก ภาษาไทย",
    (
        "emoji \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308"
        " \U0001f44d\U0001f3fd \U0001f600\U0001f600 \U0001f1e9\U0001f1ea"
    ),
    "def f(x):\n\tif x > 10:\n\t\treturn x ** 2\n    else:\n        return None  # c\r\n\r\n\n\n\n",
    "  leading and   multiple     spaces                    end   ",
    "numbers 1 12 123 1234 12345 3.14159 1,000,000 2024-01-01 0x1F v1.2.3",
    "\t\t\ttabs\t \t mixed \n \n\n  \n",
    "\u03a9\u2248\xe7\u221a\u222b\u02dc\xb5\u2264\u2265\xf7 \u200b\xa0\u2003\ufeff \x00\x01\x7f end",
]
SMOLLM_SPECIAL = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|> c<file_sep>d",
]
# fmt: off
SMOLLM_IDS = [
    [19556, 28, 905, 17, 657, 506, 253, 1028, 28, 3247, 982, 357, 47, 1069, 3060, 3543, 392, 6737, 339, 23,
    61],
    [66, 2756, 5422, 2756, 15486, 46494, 40852, 5549, 223, 863, 1321, 45682, 5549, 137, 593, 4040, 34878, 85,
    5549, 126, 397, 16148, 24488, 125, 28683, 18811, 236, 36874],
    [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226, 17097, 137,
    112, 36518, 7365, 229, 7365, 120, 16736, 114, 7365, 242, 10391, 228, 29184, 19076, 28589, 29184, 36518,
    40562, 116, 28, 43222, 229, 16313, 239, 19076, 33085, 246, 181, 130, 251, 183, 240, 129, 25947, 122, 133,
    183, 248, 115, 183, 248, 223, 41259, 226, 41259, 114],
    [22208, 30914, 12667, 10805, 21706, 45704, 12667, 23339, 48934, 21706, 35964, 20602, 44626, 21706, 43463,
    27819, 12667, 22682, 35964, 31462, 20602, 48934, 10805, 27438, 22682, 216, 164, 111, 164, 112, 164, 113],
    [30658, 35090, 38770, 16525, 26293, 30581, 12335, 116, 42990, 30658, 27011, 32932, 18075, 28, 12335, 124,
    4300, 134, 12335, 233, 38565, 12335, 120, 21891, 37189, 38565, 16525, 4300, 132, 4300, 113, 12335, 134,
    9310, 226, 216, 9310, 117, 9310, 118, 9310, 119],
    [10283, 120, 10283, 117, 10283, 126, 10283, 120, 10283, 238, 10283, 130, 10283, 228, 43662, 10283, 117,
    31933, 220, 10283, 115, 10283, 219, 216, 10283, 250, 43662, 10283, 119, 43662, 31933, 222, 10283, 241,
    10283, 112],
    [391, 33777, 15107, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 321, 231, 10813, 235,
    116, 15107, 233, 128, 31752, 321, 231, 10813, 230, 226, 15107, 235, 231, 10813, 233, 138, 40303, 218,
    10813, 242, 218, 15107, 225, 119, 10813, 225, 120],
    [1604, 275, 24, 104, 727, 198, 197, 342, 1792, 2986, 216, 33, 32, 42, 3354, 197, 5406, 1792, 1903, 216,
    34, 472, 1745, 42, 448, 1003, 1943, 216, 907, 265, 7209, 22342],
    [216, 2899, 284, 256, 2701, 289, 5600, 42185, 1112, 333],
    [28707, 216, 33, 216, 33, 34, 216, 33, 34, 35, 216, 33, 34, 35, 36, 216, 33, 34, 35, 36, 37, 216, 35, 30,
    33, 36, 33, 37, 41, 216, 33, 28, 32, 32, 32, 28, 32, 32, 32, 216, 34, 32, 34, 36, 29, 32, 33, 29, 32, 33,
    216, 32, 104, 33, 54, 386, 33, 30, 34, 30, 35],
    [1656, 197, 100, 7366, 197, 216, 197, 6468, 3717, 38028, 32057],
    [153, 119, 40533, 226, 11512, 22052, 244, 22052, 121, 150, 246, 39269, 40533, 114, 40533, 115, 142, 132,
    459, 229, 15442, 321, 221, 186, 136, 140, 216, 190, 191, 217, 1112],
    [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198],
    [81, 0, 82, 216, 2, 265, 5, 84],
]
# fmt: on
GEMMA_SPECIAL = [
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "a<bos>b <eos> c<pad><unused0>d[multimodal]e<mask><unk>f",
    "x<start_of_image>y <table> <h1>z</h1>\n\n\n\t\t\t<0x41> <strong>q</strong>",
]
# fmt: off
GEMMA_IDS = [
    [2, 9259, 236764, 1902, 236888, 1030, 236789, 236751, 496, 1594, 236764, 5889, 236789, 236745, 625,
    236881, 2195, 236789, 859, 236789, 560, 692, 236789, 236753, 564, 236789, 236792],
    [2, 233442, 120362, 96008, 44667, 829, 80406, 8046, 5875, 16756, 131079, 624, 237066, 87125, 200990,
    38817],
    [2, 94951, 236945, 95830, 236743, 201637, 19735, 237915, 237943, 237122, 237364, 236924, 237103, 31818,
    238741, 236764, 30203, 236924, 114216, 237430, 16950, 237851, 15245],
    [2, 23705, 20208, 28482, 31892, 9549, 32086, 115241, 241303, 242044],
    [2, 226767, 19975, 236764, 3242, 2054, 55460, 820, 158281, 239414],
    [2, 49366, 138863, 95266, 162660, 49862],
    [2, 67906, 236743, 243874, 237243, 243767, 237243, 244814, 237243, 244990, 236743, 248177, 238178,
    237243, 243712, 103712, 242713, 163543, 242398, 236743, 246841, 245562],
    [2, 2063, 517, 236769, 236781, 1473, 107, 255968, 584, 1123, 1890, 236743, 236770, 236771, 236787, 107,
    255969, 2060, 1123, 5213, 236743, 236778, 107, 140, 4454, 236787, 107, 144, 2060, 5450, 138, 236865, 505,
    251, 107, 251, 110],
    [2, 138, 26016, 532, 139, 43819, 141, 35220, 156, 643, 139],
    [2, 34488, 236743, 236770, 236743, 236770, 236778, 236743, 236770, 236778, 236800, 236743, 236770,
    236778, 236800, 236812, 236743, 236770, 236778, 236800, 236812, 236810, 236743, 236800, 236761, 236770,
    236812, 236770, 236810, 236819, 236743, 236770, 236764, 236771, 236771, 236771, 236764, 236771, 236771,
    236771, 236743, 236778, 236771, 236778, 236812, 236772, 236771, 236770, 236772, 236771, 236770, 236743,
    236771, 236781, 236770, 236811, 566, 236770, 236761, 236778, 236761, 236800],
    [2, 255970, 39218, 255968, 236743, 255968, 9726, 236743, 107, 236743, 108, 138, 107],
    [2, 239995, 240443, 236999, 239176, 240842, 241700, 239407, 239485, 240260, 241055, 36504, 432, 398, 464,
    366, 369, 237922, 236743, 238, 249732, 251541, 1345],
    [2, 105, 2364, 107, 10979, 106, 107, 105, 4368, 107],
    [2, 236746, 2, 236763, 236743, 1, 505, 0, 6, 236753, 5, 236744, 4, 3, 236760],
    [2, 236781, 255999, 236762, 236743, 168, 236743, 184, 236802, 191, 109, 255970, 236820, 236771, 236781,
    236812, 236770, 236813, 236743, 198, 236809, 207],
]
# fmt: on


# --- ids ---


@pytest.mark.parametrize("index", range(len(PROBES) + len(SMOLLM_SPECIAL)))
def test_smollm_ids(index: int, smollm: Tokenizer) -> None:
    text = [*PROBES, *SMOLLM_SPECIAL][index]
    assert smollm.encode(text) == SMOLLM_IDS[index]
    assert smollm.decode(SMOLLM_IDS[index], skip_special_tokens=False) == text


@pytest.mark.parametrize("index", range(len(PROBES) + len(GEMMA_SPECIAL)))
def test_gemma_ids(index: int, gemma: Tokenizer) -> None:
    text = [*PROBES, *GEMMA_SPECIAL][index]
    assert gemma.encode(text) == GEMMA_IDS[index]
    assert gemma.encode(text, add_special_tokens=False) == GEMMA_IDS[index][1:]
    assert gemma.decode(GEMMA_IDS[index], skip_special_tokens=False) == "<bos>" + text


@pytest.mark.slow
def test_smollm_ids_equal_transformers(smollm: Tokenizer, smollm_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(smollm_path.parent), gguf_file=smollm_path.name)
    for text in [*PROBES, *SMOLLM_SPECIAL]:
        if not any(character.isdigit() and not character.isascii() for character in text):
            assert smollm.encode(text) == theirs(text)["input_ids"]
    messages = [{"role": "user", "content": "Hi\n there"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert smollm.apply_chat_template(messages) == expected


def test_roles_and_sizes(smollm: Tokenizer, gemma: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_ids) == (49152, 1, [2])
    assert (gemma.vocab_size, gemma.bos_token_id, gemma.eos_token_ids) == (262144, 2, [1])
    assert gemma.decode(gemma.encode("a<eos>b")) == "ab"


def test_what_is_no_text_is_refused(smollm: Tokenizer) -> None:
    with pytest.raises(InputError, match="takes a str, given list"):
        smollm.encode(["a"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="surrogate pair at character 1"):
        smollm.encode("a\ud800")
    with pytest.raises(InputError, match="0 or more, given -1"):
        smollm.decode([5, -1])
    assert smollm.decode([10**6]) == ""


# --- vocabularies made here ---


def sentencepiece_metadata(pieces: dict[str, float], **extra: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def random_pieces(seed: int) -> dict[str, float]:
    """Letters, and pieces that pairs of pieces make, with scores that fall in the order of a training run."""
    rng = random.Random(seed)
    pieces = list("▁abcdé")
    while len(pieces) < 60:
        piece = rng.choice(pieces) + rng.choice(pieces)
        if piece not in pieces and len(piece) < 7:
            pieces.append(piece)
    order = rng.sample(range(6, 60), 54)
    return {piece: -float(order[i - 6] if i >= 6 else 1000 + i) for i, piece in enumerate(pieces)}


def greedy_merges(text: str, pieces: dict[str, float]) -> list[str]:
    """SentencePiece BPE as it is defined: the best-scored pair of neighbours is joined, leftmost of
    equals.
    """
    parts = list(text)
    while True:
        joined = [(pieces[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not joined:
            return parts
        place = -max(joined)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.mark.parametrize("seed", range(5))
def test_merges_from_scores_give_what_sentencepiece_gives(seed: int) -> None:
    pieces, rng = random_pieces(seed), random.Random(seed)
    metadata = sentencepiece_metadata(pieces, add_space_prefix=False, add_bos_token=False)
    tokenizer = build_tokenizer(metadata, "here")
    for _ in range(100):
        text = "".join(rng.choice("  abcdé") for _ in range(30))
        ids = tokenizer.encode(text)
        ours = [metadata["tokenizer.ggml.tokens"][token] for token in ids]
        assert ours == greedy_merges(text.replace(" ", "▁"), pieces)
        assert tokenizer.decode(ids) == text


def test_llama_2_conventions() -> None:
    metadata = sentencepiece_metadata({"▁": -9.0, "h": -8.0, "i": -7.0, "hi": -1.0, "▁hi": -2.0})
    tokenizer = build_tokenizer(metadata, "here")  # absent keys: a space and a bos token in front
    names = metadata["tokenizer.ggml.tokens"]
    assert [names[i] for i in tokenizer.encode("hi hi")] == ["<s>", "▁hi", "▁hi"]
    assert [names[i] for i in tokenizer.encode("</s>hi", False)] == ["</s>", "▁hi"]
    assert [names[i] for i in tokenizer.encode("é", False)] == ["▁", "<0xC3>", "<0xA9>"]
    ids = tokenizer.encode("hi  hi é</s>hi")
    assert tokenizer.decode(ids) == "hi  hi é hi"
    assert streamed(tokenizer, ids) == "hi  hi é hi"
    closed = build_tokenizer({**metadata, "tokenizer.ggml.add_eos_token": True}, "here")
    assert [names[i] for i in closed.encode("hi")] == ["<s>", "▁hi", "</s>"]


def byte_level_metadata(**extra: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "Ġ 1", "a b", "ab c", "b c"]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), "abcd", "<|end|>", "<user>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": 2**32 - 1,
        "tokenizer.ggml.eot_token_id": len(tokens) - 2,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["123", "4", "Ġ", "12", "Ġ", "abc", "d"]),
        ("smollm", ["1", "2", "3", "4", "Ġ", "1", "2", "Ġ", "abc", "d"]),
        ("llama-bpe", ["<|end|>", "123", "4", "Ġ", "12", "Ġ", "abc", "d"]),
        ("qwen2", ["1", "2", "3", "4", "Ġ", "1", "2", "Ġ", "abc", "d"]),
        ("tekken", ["<|end|>", "1", "2", "3", "4", "Ġ", "1", "2", "Ġ", "abc", "d"]),
        ("gpt-4o", ["123", "4", "Ġ", "12", "Ġ", "abc", "d"]),
        ("glm4", ["123", "4", "Ġ", "12", "Ġ", "abc", "d"]),
        ("starcoder", ["1", "2", "3", "4", "Ġ", "1", "2", "Ġ", "abc", "d"]),
        ("lfm2", ["<|end|>", "123", "4", "Ġ", "12", "Ġ", "abc", "d"]),
        ("deepseek-llm", ["123", "4", "Ġ", "12", "Ġ", "abc", "d"]),
        ("deepseek-coder", ["1", "2", "3", "4", "Ġ", "1", "2", "Ġ", "abc", "d"]),
        ("deepseek-v3", ["123", "4", "Ġ", "12", "Ġ", "abc", "d"]),
    ],
)
def test_splitting_by_name(pre: str, expected: list[str]) -> None:
    metadata = byte_level_metadata(pre=pre)
    tokenizer = build_tokenizer(metadata, "here")
    names = metadata["tokenizer.ggml.tokens"]
    assert [names[i] for i in tokenizer.encode("1234 12 abcd")] == expected
    whole = ["abcd"] if pre in ("llama-bpe", "tekken", "lfm2") else ["abc", "d"]  # a word that is a token
    assert [names[i] for i in tokenizer.encode("abcd", False)] == whole
    ids = tokenizer.encode("a<user>b<|end|>", False)
    assert [names[i] for i in ids] == ["a", "<user>", "b", "<|end|>"]
    assert tokenizer.decode(ids) == "a<user>b"
    assert tokenizer.eos_token_ids == [names.index("<|end|>")]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-4o", "HelloWorld can'T 12345 x/\n", ["Hello", "World", " can'T", " ", "123", "45", " x", "/\n"]),
        ("deepseek-v3", "can't 日本go 12345!ok\n", ["can", "'t", " ", "日本", "go", " ", "123", "45", "!ok", "\n"]),
        ("deepseek-llm", "Ünder_1234, 日本.\n", ["Ü", "nder", "_", "1234", ",", " ", "日本", ".", "\n"]),
        ("deepseek-coder", "a_b 日12\n", ["a", "_", "b", " ", "日", "1", "2", "\n"]),
    ],
)
def test_words_by_name(pre: str, text: str, words: list[str]) -> None:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITTINGS[pre].patterns]
    assert [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)] == words


def test_gemma_4_merges_text_as_it_is() -> None:
    pieces = {"▁": 0.0, "h": 0.0, "i": 0.0, "\n": 0.0, "hi": 0.0, "▁hi": 0.0, "\n\n": 0.0}
    metadata = sentencepiece_metadata(pieces, model="gemma4", merges=["h i", "▁ hi", "\n \n"], add_bos_token=True)
    tokenizer = build_tokenizer(metadata, "here")
    names = metadata["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("hi hi\n\n\nhié")
    assert [names[i] for i in ids] == ["<s>", "hi", "▁hi", "\n\n", "\n", "hi", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hi hi\n\n\nhié"


def test_vocabularies_that_cannot_be_read() -> None:
    for metadata, message in (
        (byte_level_metadata(pre="surprise"), "tokenizer.ggml.pre = 'surprise', is not known; known are"),
        (byte_level_metadata(model="bert"), "tokenizer.ggml.model = 'bert' is not supported"),
        (byte_level_metadata(tokens=[]), "holds no vocabulary"),
        (byte_level_metadata(token_type=[1]), "1 token types"),
        (byte_level_metadata(merges=["no such"]), "merges do not fit"),
        (sentencepiece_metadata({"a": 0.0}, scores=[1.0]), "the file has 1 for 260 tokens"),
        (sentencepiece_metadata({"a": 0.0}, precompiled_charsmap=[1]), "text normalization"),
    ):
        with pytest.raises(LoadError, match=message):
            build_tokenizer(metadata, "here")


# --- streams ---


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
    stream = tokenizer.stream(skip_special_tokens)
    pieces = [stream.step(token) for token in ids]
    return "".join(pieces) + stream.flush()


def test_streams_give_the_whole_text(smollm: Tokenizer, gemma: Tokenizer) -> None:
    for tokenizer, special in ((smollm, SMOLLM_SPECIAL), (gemma, GEMMA_SPECIAL)):
        for text in [*PROBES, *special, " ", "", "\n\n x"]:
            ids = tokenizer.encode(text)
            for skip in (True, False):
                assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


def test_a_stream_waits_for_whole_characters_and_for_nothing_else(smollm: Tokenizer, gemma: Tokenizer) -> None:
    stream = gemma.stream()
    ids = gemma.encode("ab 𓀀 c", add_special_tokens=False)
    pieces = [stream.step(token) for token in ids]
    assert "".join(pieces) == "ab 𓀀 c"
    assert pieces.count("") == 4  # the four bytes, as another, broken one could follow
    assert pieces[-1] == "𓀀 c"
    assert stream.flush() == ""
    stream = smollm.stream()
    assert [stream.step(token) for token in smollm.encode("a🎉b", add_special_tokens=False)] == ["a", "", "", "🎉", "b"]


def test_a_stream_of_broken_bytes_is_what_decode_says(smollm: Tokenizer, gemma: Tokenizer) -> None:
    bytes_of_gemma = gemma.encode("\x00", False)[0]  # the tokens of the bytes 0, 1, …
    for given in ([0xC3, 0xA9, 0xFF, 0xF0, 0x9F], [0xC3, 0xA9], [0xC3, 0xA9, 0xF0], [0xFF] * 200):
        ids = [bytes_of_gemma + byte for byte in given]
        for end in ([], gemma.encode("x", False)):
            assert streamed(gemma, [*ids, *end]) == gemma.decode([*ids, *end])
    rng = random.Random(0)
    broken = [i for i in range(smollm.vocab_size) if "\ufffd" in smollm.decode([i])]
    for count, choice in ((2000, range(smollm.vocab_size)), (500, broken), (300, broken[:1])):
        ids = [rng.choice(choice) for _ in range(count)]
        assert streamed(smollm, ids) == smollm.decode(ids)


def test_a_long_row_of_bytes_is_not_held_back_for_ever(gemma: Tokenizer) -> None:
    zero, text = gemma.encode("\x00", False)[0], "𓀀é" * 300
    stream = gemma.stream()
    pieces = [stream.step(zero + byte) for byte in text.encode()]
    assert sum(map(len, pieces)) > 500
    assert "".join(pieces) + stream.flush() == text
