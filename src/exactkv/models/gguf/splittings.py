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
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_WHITESPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{cases}" for cases in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"

# DeepSeek's are expressions that cut one after the other. These letters have a case, as far as its list goes; escaped,
# since normalization would change some.
_CASED_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",  # and so ASCII letters, alone
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
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
    "seed-coder": Splitting((_SEED,)),
    "tekken": Splitting((_TEKKEN,), whole_words=True, add_bos=True),
    "gpt-4o llama4": Splitting((_GPT4O,)),
    "deepseek-llm": Splitting(_DEEPSEEK_LLM),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "deepseek-v3": Splitting(_DEEPSEEK_V3),
}
SPLITTINGS = {name: splitting for names, splitting in _OF_NAMES.items() for name in names.split()}
