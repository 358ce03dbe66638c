"""Files beside a tokenizer in the folder of a model: names and ids of special tokens, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..artifact.regular_files import read_regular
from .errors import TokenizerError
from .params import SamplingParams


class TokenizerConfig:
    """Facts of a folder about a tokenizer, apart from the vocabulary.

    ``tokenizer_config.json``, ``added_tokens.json``, ``chat_template.jinja`` and ``.json`` are read, and tokens that
    end a text from ``config.json``, ``generation_config.json`` and ``genai_config.json``. Any of them may be missing.
    Raises TokenizerError if a file cannot be read or does not hold what is expected.
    """

    def __init__(
        self,
        folder: Path,  # folder of a model, as Hugging Face or onnxruntime-genai writes it
    ) -> None:
        self._folder = folder
        self.fields = read_object(folder / "tokenizer_config.json")  # content of ``tokenizer_config.json``
        self.end_ids = set(self._find_ends())  # tokens that end a text
        self.chat_template = self._find_template()  # chat template in jinja2, if there is one
        generation = folder / "generation_config.json"
        # `SamplingParams` that ``generation_config.json`` recommends.
        self.sampling_defaults = SamplingParams.defaults_in(read_object(generation), str(generation))

    def name(self, key: str) -> str | None:
        """Name of a special token, such as ``bos_token``, which files write as text or as an object."""
        return content(self.fields.get(key))

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Name of each token that is added to a vocabulary, and whether it is a control token."""
        named = read_object(self._folder / "added_tokens.json")
        tokens: list[tuple[Any, str, bool]] = [(number, name, False) for name, number in named.items()]
        described = self.fields.get("added_tokens_decoder")
        for number, token in described.items() if isinstance(described, dict) else ():
            is_control = isinstance(token, dict) and token.get("special") is True
            tokens.append((int(number) if number.isdecimal() else number, content(token) or "", is_control))
        for number, name, _ in tokens:
            if type(number) is not int or not 0 <= number < 1 << 31 or not name:
                raise TokenizerError(f"{self._folder}: found {name!r:.100} as added token {number!r:.100}")
        return {number: (name, is_control) for number, name, is_control in tokens}

    def _find_ends(self) -> Iterator[int]:
        for file in ("config", "generation_config", "genai_config"):
            values = read_object(self._folder / f"{file}.json")
            for value in (values, values.get("text_config"), values.get("model")):
                ids = value.get("eos_token_id") if isinstance(value, dict) else None
                yield from (number for number in (ids if isinstance(ids, list) else [ids]) if type(number) is int)

    def _find_template(self) -> str | None:
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            return read_text(path)
        other = read_object(self._folder / "chat_template.json")
        template = self.fields.get("chat_template", other.get("chat_template"))
        if isinstance(template, list):
            default = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
            template = default[0].get("template") if default else None
        return template if isinstance(template, str) else None


def read_text(path: Path) -> str:
    """Read a text file."""
    try:
        return read_regular(path).decode()
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; {} if the file does not exist."""
    try:
        value = json.loads(read_text(path)) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found {value!r:.100}, expected names and values")
    return value


def content(token: Any) -> str | None:
    """Name of a token, which files write as text or as an object."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None
