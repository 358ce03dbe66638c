"""`rh.llm.load_tokenizer`: the tokenizer of a folder of Hugging Face, whichever files describe it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.regular_files import read_regular
from .errors import TokenizerError
from .json_tokenizer import JsonTokenizer
from .sentencepiece_model import read_sentencepiece_model
from .tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, Tokenizer
from .tokenizer_config import TokenizerConfig, read_text

if TYPE_CHECKING:
    from ..frontend.gguf.file import GgufFile


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer | JsonTokenizer:
    """Read the tokenizer of a folder.

    Parameters
    ----------
    folder : str or PathLike of str
        Folder with a ``tokenizer.json``, else a ``tokenizer.model`` or ``spiece.model`` of sentencepiece, else a
        ``vocab.txt`` of BERT; and perhaps the files that `JsonTokenizer` reads as well.

    Returns
    -------
    Tokenizer or JsonTokenizer
        Tokenizer with its stop tokens and chat template.

    Raises
    ------
    TokenizerError
        If none of these files is there, or one is damaged.
    """
    path = Path(folder)
    if (path / "tokenizer.json").exists():
        return JsonTokenizer(path)
    config = TokenizerConfig(path)
    for name, read in _READERS.items():
        if (path / name).exists():
            fields = read(path / name, config)
            break
    else:
        expected = ", ".join(["tokenizer.json", *_READERS])
        raise TokenizerError(f"{path}: found no tokenizer, expected one of {expected}")
    template = {"tokenizer.chat_template": config.chat_template}
    tokenizer = Tokenizer(template | {f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    for token in config.end_ids:
        if not 0 <= token < len(tokenizer):
            raise TokenizerError(f"{path}: texts end with token {token}, expected one below {len(tokenizer)}")
    tokenizer.stop_ids |= config.end_ids
    tokenizer.sampling_defaults = config.sampling_defaults
    return tokenizer


def tokenizer_of(file: GgufFile) -> Tokenizer | JsonTokenizer:
    """The tokenizer of a GGUF file, or of a folder of Hugging Face that was read as one.

    Raises TokenizerError as `load_tokenizer` and `Tokenizer` do.
    """
    return load_tokenizer(file.path) if file.path.is_dir() else Tokenizer(file.fields)


def _read_sentencepiece(path: Path, config: TokenizerConfig) -> dict[str, Any]:
    try:
        fields = read_sentencepiece_model(read_regular(path))
        _add_tokens(fields, config)
    except (OSError, TokenizerError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    flags = {key: config.fields.get(key) for key in ("add_bos_token", "add_eos_token")}
    return fields | {key: value for key, value in flags.items() if isinstance(value, bool)}


def _read_words(path: Path, config: TokenizerConfig) -> dict[str, Any]:
    """Read the words of BERT, a line each, under the names that GGUF files give them."""
    lines = read_text(path).replace("\r\n", "\n").rstrip("\n").split("\n")
    special = {config.name(key) or default for key, default in _BERT_NAMES.items()}
    fields: dict[str, Any] = {
        "model": "bert",
        "tokens": [name if name in special else name[2:] if name[:2] == "##" else f"\u2581{name}" for name in lines],
        "token_type": [CONTROL if name in special else NORMAL for name in lines],
    }
    for key, option in _BERT_OPTIONS.items():
        value = config.fields.get(option)
        if isinstance(value, bool):
            fields[key] = value
    for key, name in (
        ("unknown_token_id", "unk_token"),
        ("bos_token_id", "cls_token"),
        ("seperator_token_id", "sep_token"),
    ):
        expected = config.name(name) or _BERT_NAMES[name]
        if expected not in lines:
            raise TokenizerError(f"{path}: found no {expected!r}, expected a line of it")
        fields[key] = lines.index(expected)
    return fields


def _add_tokens(fields: dict[str, Any], config: TokenizerConfig) -> None:
    """Add the tokens of the configuration to the pieces of a model."""
    names, kinds, scores = fields["tokens"], fields["token_type"], fields["scores"]
    added = config.added_tokens()
    missing = max(added, default=-1) + 1 - len(names)
    if missing > len(names) + _MAX_HOLES:
        raise TokenizerError(f"found added token {max(added)}, expected numbers up to the {len(names):,} of tokens")
    names += [f"[PAD{len(names) + hole}]" for hole in range(missing)]
    kinds += [UNUSED] * max(missing, 0)
    scores += [0.0] * max(missing, 0)
    for token, (name, is_control) in added.items():
        if names[token] != name or kinds[token] in (UNUSED, NORMAL):
            names[token], kinds[token] = name, CONTROL if is_control else USER_DEFINED
    for key in ("bos_token", "eos_token", "unk_token"):
        special = config.name(key)
        if special in names:
            fields["unknown_token_id" if key == "unk_token" else f"{key}_id"] = names.index(special)


_BERT_NAMES = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
_BERT_OPTIONS = {
    "normalizer.lowercase": "do_lower_case",
    "normalizer.strip_accents": "strip_accents",
    "normalizer.handle_chinese_chars": "tokenize_chinese_chars",
}
_MAX_HOLES = 1024  # added tokens have ids below twice the number of pieces, plus this number
_READERS = {"tokenizer.model": _read_sentencepiece, "spiece.model": _read_sentencepiece, "vocab.txt": _read_words}
"""Readers of the metadata that a GGUF file of the same tokenizer has, by file, in the order in which they are tried."""
