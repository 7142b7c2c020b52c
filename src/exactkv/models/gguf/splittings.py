"""How text is cut into words before byte-level BPE, by the names that GGUF files give (`tokenizer.ggml.pre`).

A file only names its regular expressions; those that a name means are in llama.cpp (llama-vocab.cpp) and in the models'
own tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import normalizers

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_WHITESPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_WHITESPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{cases}" for cases in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"

# DeepSeek's: expressions that cut one after the other.
_LATIN_GREEK_AND_SO_ON = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕ"
    "ℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_EAST_ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LLM = (
    "[\r\n]", rf"\s?[{_LATIN_GREEK_AND_SO_ON}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _EAST_ASIAN, r"\p{N}+",
)  # fmt: skip
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _WHITESPACE,
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How text is cut into words before BPE. patterns: regular expressions that cut one after the other; none for
    GPT-2's own, which byte-level BPE brings along. single_digits: every digit (of any script) stands alone.
    whole_words: a word that is a token is taken without looking at the merges. add_bos: where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    whole_words: bool = False
    add_bos: bool = False
    normalizer: Normalizer | None = None


_OF_NAMES = {
    "default gpt-2 phi-2 mpt olmo exaone4": Splitting(),
    "smollm starcoder refact command-r codeshell exaone": Splitting(single_digits=True),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2": Splitting((_LLAMA3,), whole_words=True, add_bos=True),
    "smaug-bpe dbrx glm4 chatglm-bpe": Splitting((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen": Splitting((_QWEN2,), normalizer=normalizers.NFC()),
    "tekken": Splitting((_TEKKEN,), whole_words=True, add_bos=True),
    "gpt-4o llama4": Splitting((_GPT4O,)),
    "deepseek-llm": Splitting(_DEEPSEEK_LLM),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "deepseek-v3": Splitting(_DEEPSEEK_V3),
}
SPLITTINGS = {name: splitting for names, splitting in _OF_NAMES.items() for name in names.split()}
