"""How byte-level vocabularies cut text into words before merging bytes, by the names that GGUF files give."""

from __future__ import annotations

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDS}"
_QWEN2 = rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Expressions that are applied one after the other; each makes words of its matches and of the text between them.
_FAMILIES: dict[tuple[str, ...], tuple[str, ...]] = {
    (_GPT2,): ("gpt-2", "phi-2", "olmo", "mpt", "jais", "roberta-bpe", "trillion"),
    (r"\p{N}", _GPT2): ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
    (_LLAMA3,): ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "dbrx", "smaug-bpe", "chatglm-bpe"),
    (_QWEN2,): ("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"),
    (_TEKKEN,): ("tekken",),
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"): ("default",),
}
SPLITS = {name: expressions for expressions, names in _FAMILIES.items() for name in names}

WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "tekken"}
"""Where a word that is a token is that token, whatever merges say."""
