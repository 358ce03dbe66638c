"""Pre-tokenizers of GGUF files: how each name of ``tokenizer.ggml.pre`` splits a text into words.

The names are llama.cpp's. Where its expressions approximate those of the models' ``tokenizer.json``, the latter stand
here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """Facts that a name states about a vocabulary whose merges are listed."""

    # Regular expressions, applied one after the other: each splits text into its matches and the text between them.
    splits: tuple[str, ...]
    whole_words: bool = False  # whether a word that is a token becomes it without merges (``ignore_merges``)
    adds_begin: bool = False  # whether texts begin with a token, unless the file says otherwise
    # Whether names of tokens have a character for each byte; otherwise they have the text's characters, and other
    # characters become tokens of bytes such as ``<0x0A>``.
    is_byte_level: bool = True
    escapes_spaces: bool = False  # whether spaces are U+2581 in names of tokens


_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_BLANKS = rf"{_SIGNS}[\r\n]*|{_SPACES}"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|\s+(?!\S)|\s+"


def _words(numbers: str, blanks: str = _BLANKS) -> str:
    """Short forms, words with at most one sign before them, numbers, signs and spaces."""
    return rf"{_SHORT_FORMS}|{_WORD}|{numbers}|{blanks}"


def _words_by_case(others: str, suffix: str = "", letters: str = "") -> str:
    """Words of capitals then small letters, among `letters`, with at most one sign before them; and `others`."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]"
    sign = r"[^\r\n\p{L}\p{N}]?"
    return rf"{sign}{upper}*{lower}+{suffix}|{sign}{upper}+{lower}*{suffix}|{others}"


_LLAMA3, _QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_QWEN35 = (
    rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SPACES_IN_POWERS = "|".join(rf"\s{{{count}}}(?!\S)" for count in "512 256 128 64 32 16 8 4 1,2".split())
_JAIS2 = _words(r"\p{N}{1,3}", rf"{_SIGNS}[\r\n]*|\s*[\r\n]+|{_SPACES_IN_POWERS}|\s")
_TEKKEN = _words_by_case(rf"\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACES}")
_YOUTU = _words_by_case(rf"\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACES}", _SHORT_FORMS + "?")
_O200K = _words_by_case(rf"\p{{N}}{{1,3}}|{_SIGNS}[\r\n/]*|{_SPACES}", _SHORT_FORMS + "?")
_KIMI = r"\p{Han}+|" + _words_by_case(rf"\p{{N}}{{1,3}}|{_BLANKS}", _SHORT_FORMS + "?", r"&&[^\p{Han}]")
_SEED = _words(r"\p{N}", rf" ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}")
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SIGNS}[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# Letters with case, punctuation of ASCII and of Chinese, Chinese and Korean, numbers.
_DEEPSEEK = (
    r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}+",
)  # fmt: skip
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_MARKED_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3_WORDS = rf"{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3_WORDS)
_SPARK = (r"\p{N}{1,3}", _HAN_KANA, rf"{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
# Korean, punctuation of Chinese, Bopomofo, Chinese and kana.
_EAST_ASIAN = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_HAN_KANA}"
)
# Scripts without spaces between words: Chinese, kana, Thai, Lao, Khmer, Myanmar, Korean.
_WITHOUT_SPACES = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_THREES_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_LINES = r"[^\n]+|\n+"
_CHAMELEON = (
    r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2
)  # fmt: skip
_PUNCTUATION = r"\p{P}\$\+<=>\^~\|"
_DEFAULT = (rf"[{_PUNCTUATION}]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _table(*rows: tuple[str, PreTokenizer]) -> dict[str, PreTokenizer]:
    return {name: row for names, row in rows for name in names.split()}


PRE_TOKENIZERS = _table(
    ("default", PreTokenizer(_DEFAULT)),
    (
        "gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert roberta-bpe "
        "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
        PreTokenizer((_GPT2,)),
    ),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    ("falcon", PreTokenizer((rf"[{_PUNCTUATION}`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), whole_words=True, adds_begin=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe glm4 glm5", PreTokenizer((_LLAMA3,))),
    ("jais-2", PreTokenizer((_JAIS2,))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True)),
    ("qwen2 stablelm2 deepseek-r1-qwen hunyuan megrez kormo f2llmv2 solar-open grok-2", PreTokenizer((_QWEN2,))),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|\p{{N}}|{_BLANKS}",))),
    ("laguna", PreTokenizer((_LINES, _QWEN2))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    ("tekken", PreTokenizer((_TEKKEN,), whole_words=True, adds_begin=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_O200K,))),
    ("granite-embed-multi-97m", PreTokenizer((_O200K,), whole_words=True)),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))),
    ("youtu", PreTokenizer((_EAST_ASIAN, _YOUTU), whole_words=True)),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("deepseek-llm", PreTokenizer(_DEEPSEEK)),
    ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3)),
    ("spark2_5", PreTokenizer(_SPARK)),
    ("afmoe", PreTokenizer((_THREES_FROM_RIGHT, _WITHOUT_SPACES, _DEEPSEEK3_WORDS))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("bloom gpt3-finnish poro-chat", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("chameleon", PreTokenizer(_CHAMELEON, adds_begin=True)),
    ("whitespace", PreTokenizer((r"\S+",), is_byte_level=False)),
    (
        "gemma4 granite-embed-multi-311m",
        PreTokenizer((_LINES,), adds_begin=True, is_byte_level=False, escapes_spaces=True),
    ),
    ("sarvam-moe", PreTokenizer((_LINES,), is_byte_level=False, escapes_spaces=True)),
)
"""Pre-tokenizer of each name."""
