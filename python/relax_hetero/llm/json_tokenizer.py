"""`rh.llm.JsonTokenizer`: text as tokens and back, as the files beside an ONNX model describe it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import TokenizerError
from .tokenizer import ENDS, byte_of_character

_SPACE = "\u2581"


class JsonTokenizer:
    """Text as tokens and back, by the package tokenizers.

    Parameters
    ----------
    folder: Has a ``tokenizer.json``, and perhaps ``genai_config.json``, ``tokenizer_config.json`` and others, which say
        what tokens end a text.

    Attributes
    ----------
    names: Of all tokens.
    stop_ids: Tokens that end a text or a turn.
    begin_id: The token for the begin of a text; None if there is none.
    chat_template: In the language of jinja2; None if there is none.

    Raises
    ------
    TokenizerError: If the folder has no such file, or the package is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder) / "tokenizer.json"
        try:
            import tokenizers
        except ImportError as error:
            raise TokenizerError(f"the package tokenizers is not installed, which reads {path}: {error}") from error
        described = _read(path)
        if "model" not in described:
            raise TokenizerError(f"{path}: found no tokenizer, expected a file that the package tokenizers writes")
        self._with_names = tokenizers.Tokenizer.from_str(json.dumps(described))
        self._as_text = tokenizers.Tokenizer.from_str(json.dumps(described))
        self._as_text.encode_special_tokens = True
        names = {token: name for name, token in self._with_names.get_vocab(with_added_tokens=True).items()}
        self.names = [names.get(token, "") for token in range(max(names, default=-1) + 1)]
        added = described.get("added_tokens") or []
        self._control = frozenset(int(one["id"]) for one in added if one.get("special"))
        self._plain = frozenset(int(one["id"]) for one in added) - self._control
        self._bytes = byte_of_character() if "ByteLevel" in _kinds(described.get("decoder")) else None
        config = _read(Path(folder) / "tokenizer_config.json", {})
        self.begin_id = self.token(_name(config.get("bos_token")))
        self.stop_ids = self._find_stops(Path(folder), config)
        template = Path(folder) / "chat_template.jinja"
        given = config.get("chat_template")
        self.chat_template = (
            template.read_text("utf-8") if template.is_file() else given if isinstance(given, str) else None
        )

    def __len__(self) -> int:
        return len(self.names)

    def encode(self, text: str, *, special: bool = True, begin: bool = True) -> list[int]:
        """The tokens of a text.

        Parameters
        ----------
        text
        special: Whether names of control tokens in the text stand for these tokens.
        begin: Whether the model's tokens for the begin and the end of a text are added, where it wants them; a begin
            not twice where the text has it already.
        """
        made = self._with_names if special else self._as_text
        tokens = [int(token) for token in made.encode(text, add_special_tokens=begin).ids]
        is_twice = begin and self.begin_id is not None and tokens[:2] == [self.begin_id] * 2
        return tokens[1:] if is_twice else tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, control tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; none for control tokens."""
        if not 0 <= token < len(self.names) or token in self._control:
            return b""
        name = self.names[token]
        if token in self._plain:
            return name.encode()
        if self._bytes is not None:
            return bytes(self._bytes[character] for character in name if character in self._bytes)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace(_SPACE, " ").encode()

    def token(self, name: str | None) -> int | None:
        """The token of a name, such as ``<end_of_turn>``; None if there is none."""
        found = None if name is None else self._with_names.token_to_id(name)
        return None if found is None else int(found)

    def _find_stops(self, folder: Path, config: dict[str, Any]) -> frozenset[int]:
        """Those that a file names, and those whose names are known to end a turn."""
        model = _read(folder / "genai_config.json", {}).get("model", {})
        found: set[int] = {int(token) for token in map(self.token, ENDS) if token is not None}
        for given in (model.get("eos_token_id"), _read(folder / "generation_config.json", {}).get("eos_token_id")):
            numbers = given if isinstance(given, list) else [given]
            found.update(int(number) for number in numbers if isinstance(number, int))
        end = self.token(_name(config.get("eos_token")))
        return frozenset(found if end is None else found | {end})


def _read(path: Path, default: Any = None) -> Any:
    """What a JSON file holds; `default` if there is one and no such file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        if default is not None:
            return default
        raise TokenizerError(f"{path}: found no such file, expected a tokenizer beside the model") from error
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error


def _name(token: Any) -> str | None:
    """The name of a token, which files write as text or with attributes."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _kinds(decoder: Any) -> set[str]:
    """The kinds of a decoder and of those it is a sequence of."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*map(_kinds, decoder.get("decoders") or []))
