"""Words into which llama.cpp splits a text, by name of the pre-tokenizer, recorded where it is installed.

`python tests/python/llm/words_of_llama_cpp.py` records them anew. In the vocabulary that it gives to llama.cpp, all
parts of the text are tokens and any two neighbours merge: each word becomes one token.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

RECORDED = Path(__file__).with_suffix(".json")
TEXT = (
    "I'm we'RE DON'T  o'Neil's 3.14 or 1234567, x12 ab34567cd  \t12\n\n\n  def f(x_y):\r\n\treturn {'a': [1,22]} != b//"
    "c\n/  \n  $5+3<=`q` ~|^ #tag.. ...end! Camel HTTPServer Stra\u00dfe \u00c0\u00c9x \u03a9mega \u65e5\u672c\u8a9e"
    "\u30c6\u30b9 \u4e2d\u6587\uff0c\u3002a \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22 \u05e2\u05d1 \u0939\u093f\u0928\u094d"
    " e\u0301a\u0308 \u00bd\u00b2\u2167 \u0663\u0664 \U0001f600\u200d\U0001f468 \u2014\u201cq\u201d\u2026 "
    "<sentinel:12>IMGIMGABZ    \u3000x\u00a0y  "
)
_MAX_WORD_BYTES = 24
LEFT_OUT = {"whitespace", "exaone-moe", "superbpe", "gemma4", "granite-embed-multi-311m", "sarvam-moe"}
"""Names that are not recorded: the first lets llama.cpp abort, the others have longer words."""


def recorded() -> dict[str, list[str]]:
    """Words by name of the pre-tokenizer."""
    rows = json.loads(RECORDED.read_text())
    return {name: words for names, words in rows for name in names.split()}


def _fields(name: str) -> dict:
    from tokenizers.pre_tokenizers import ByteLevel

    from relax_hetero.llm.pre_tokenizers import PRE_TOKENIZERS

    row = PRE_TOKENIZERS[name]
    text = TEXT.replace(" ", "\u2581") if row.escapes_spaces else TEXT
    if row.is_byte_level:
        text = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    parts = {text[i : i + size] for size in range(1, _MAX_WORD_BYTES + 1) for i in range(len(text) - size + 1)}
    tokens = sorted(parts, key=lambda part: (len(part), part))
    merges = [f"{part[:cut]} {part[cut:]}" for part in tokens for cut in range(1, len(part))]
    values = {"model": "gpt2", "pre": name, "tokens": [*tokens, "<s>"], "merges": merges, "bos_token_id": len(tokens)}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def _record() -> None:
    import llama_cpp

    from llm.test_tokenizer import written
    from relax_hetero.llm import Tokenizer
    from relax_hetero.llm.pre_tokenizers import PRE_TOKENIZERS

    names: dict[tuple[str, ...], list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PRE_TOKENIZERS.keys() - LEFT_OUT:
            path = written(_fields(name), Path(folder) / "model.gguf")
            model, pieces = llama_cpp.Llama(str(path), vocab_only=True, verbose=False), Tokenizer.from_gguf(path)
            tokens = model.tokenize(TEXT.encode(), add_bos=False)
            names.setdefault(tuple(pieces.piece(token).decode() for token in tokens), []).append(name)
    rows = sorted((" ".join(sorted(group)), words) for words, group in names.items())
    RECORDED.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _record()
