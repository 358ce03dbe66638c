"""`rh.llm.JsonTokenizer`: text as tokens and back, as the files beside an ONNX model describe it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..artifact.regular_files import read_regular
from .errors import RequestError, TokenizerError
from .special_tokens import NONCHARACTERS, Prompt, SpecialTokens
from .tokenizer import ENDS, byte_of_character, package_errors

_SPACE = "\u2581"
_MAX_SPREAD, _MAX_HOLES = 4, 1024
"""Bound of a token's number: a multiple of how many tokens there are, and so many more, since files have holes."""


class JsonTokenizer:
    """Text as tokens and back, by the package tokenizers.

    Parameters
    ----------
    folder : str or PathLike of str
        Has a ``tokenizer.json``, and perhaps ``genai_config.json``, ``tokenizer_config.json`` and others, which say
        what tokens end a text.

    Attributes
    ----------
    names
        Names of all tokens.
    control_names
        Names of tokens that a text has only where `encode` is told so, such as the end of a turn.
    stop_ids
        Tokens that end a text or a turn.
    begin_id
        The token for the begin of a text; None if there is none.
    chat_template
        In the language of jinja2; None if there is none.

    Raises
    ------
    TokenizerError
        If the folder has no such file, or one that is damaged, or the package is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder) / "tokenizer.json"
        try:
            import tokenizers
        except ImportError as error:
            raise TokenizerError(f"the package tokenizers is not installed, which reads {path}: {error}") from error
        if not path.exists():
            raise TokenizerError(f"{path}: found no such file, expected a tokenizer beside the model")
        described = _read(path)
        if not isinstance(described, dict) or not isinstance(described.get("model"), dict):
            raise TokenizerError(f"{path}: found no tokenizer, expected a file that the package tokenizers writes")
        with package_errors(f"{path}: the package tokenizers refuses it"):
            self._with_names, self._as_text = (tokenizers.Tokenizer.from_str(json.dumps(described)) for _ in range(2))
            for made in (self._with_names, self._as_text):
                made.no_truncation()
                made.no_padding()
            self._as_text.encode_special_tokens = True
            vocabulary: dict[str, int] = self._with_names.get_vocab(with_added_tokens=True)
        self.names = _names(vocabulary, path)
        added = described.get("added_tokens") or []
        for one in added:
            if vocabulary.get(one["content"]) != one["id"]:
                found = f"{one['content']!r} as token {one['id']}"
                raise TokenizerError(f"{path}: found {found}, expected {vocabulary.get(one['content'])} as in the rest")
        self._control = {int(one["id"]): one for one in added if one["special"]}
        self._plain = frozenset(int(one["id"]) for one in added) - self._control.keys()
        control = {self.names[token]: token for token in self._control}
        self.control_names = frozenset(control)
        self._special = SpecialTokens(control, control)
        self._unknown = self.token(_name(described["model"].get("unk_token")))
        self._aliases: tuple[str, Any, dict[int, int]] | None = None
        self._bytes = byte_of_character() if "ByteLevel" in _kinds(described.get("decoder")) else None
        config = _read_object(Path(folder) / "tokenizer_config.json")
        self.begin_id = self.token(_name(config.get("bos_token")))
        self.stop_ids = self._find_stops(Path(folder), config)
        given = config.get("chat_template")
        template = Path(folder) / "chat_template.jinja"
        self.chat_template = _text(template) if template.is_file() else given if isinstance(given, str) else None
        for token in (*self.stop_ids, *self.encode("")):
            if not 0 <= token < len(self):
                raise TokenizerError(f"{path}: texts have or end by token {token}, expected one below {len(self)}")

    def __len__(self) -> int:
        return len(self.names)

    def encode(self, text: str, *, special: bool = True, begin: bool = True) -> list[int]:
        """The tokens of a text.

        Parameters
        ----------
        text : str
            Any text of Unicode.
        special : bool
            If true, names of control tokens in the text stand for these tokens; in a `Prompt` of a `ChatTemplate` only
            those that the template wrote do.
        begin : bool
            Whether the model's tokens for the begin and the end of a text are added, where it wants them; a begin not
            twice where the text has it already.
        """
        with package_errors("the package tokenizers fails on a text"):
            if special and isinstance(text, Prompt):
                tokens = self._encode_prompt(text, begin)
            else:
                made = self._with_names if special else self._as_text
                tokens = [int(token) for token in made.encode(text, add_special_tokens=begin).ids]
        is_twice = begin and self.begin_id is not None and tokens[:2] == [self.begin_id] * 2
        return tokens[1:] if is_twice else tokens

    def _encode_prompt(self, prompt: Prompt, begin: bool) -> list[int]:
        """Tokens by a tokenizer without control tokens, but with aliases of them, which stand where they belong."""
        if self._aliases is None or self._aliases[0] in prompt:
            self._aliases = self._with_aliases(next(each for each in NONCHARACTERS if each not in prompt))
        marker, made, tokens = self._aliases
        parts = self._special.split(prompt)
        text = "".join(part if isinstance(part, str) else f"{marker}{part}{marker}" for part in parts)
        encoded = made.encode(text, add_special_tokens=begin)
        for token, is_added in zip(encoded.ids, encoded.special_tokens_mask, strict=True):
            if token in self._control and token != self._unknown and not is_added:
                raise RequestError(f"messages: found a text that is the control token {self.names[token]!r}")
        return [int(tokens.get(token, token)) for token in encoded.ids]

    def _with_aliases(self, marker: str) -> tuple[str, Any, dict[int, int]]:
        """A character that aliases have and no text has, a tokenizer, and the token that each alias stands for."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Words

        made = Words.from_str(self._with_names.to_str())
        made.encode_special_tokens = True
        aliases = {f"{marker}{token}{marker}": one for token, one in self._control.items()}
        made.add_tokens(
            [AddedToken(alias, lstrip=one["lstrip"], rstrip=one["rstrip"]) for alias, one in aliases.items()]
        )
        vocabulary = made.get_vocab(with_added_tokens=True)
        return marker, made, {vocabulary[alias]: int(one["id"]) for alias, one in aliases.items()}

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, control tokens left out; bytes that are no UTF-8 become U+FFFD.

        Parameters
        ----------
        tokens : iterable of int
            Numbers of tokens; those that are not in the vocabulary give no text.
        """
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; none for control tokens.

        Parameters
        ----------
        token : int
            Number of the token.
        """
        if not 0 <= token < len(self.names) or token in self._control:
            return b""
        name = self.names[token]
        if token in self._plain:
            return name.encode()
        if self._bytes is not None:
            return bytes(self._bytes[character] for character in name if character in self._bytes)
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):
            return bytes.fromhex(name[3:5])
        return name.replace(_SPACE, " ").encode()

    def token(self, name: str | None) -> int | None:
        """The token of a name, such as ``<end_of_turn>``; None if there is none.

        Parameters
        ----------
        name : str or None
            Text of the token; None gives None.
        """
        with package_errors(f"found {name!r:.100} as the name of a token"):
            found = None if name is None else self._with_names.token_to_id(name)
        return None if found is None else int(found)

    def _find_stops(self, folder: Path, config: dict[str, Any]) -> frozenset[int]:
        """Those that a file names, and those whose names are known to end a turn."""
        model = _read_object(folder / "genai_config.json").get("model")
        generation = _read_object(folder / "generation_config.json")
        found: set[int] = {int(token) for token in map(self.token, ENDS) if token is not None}
        for given in (model.get("eos_token_id") if isinstance(model, dict) else None, generation.get("eos_token_id")):
            numbers = given if isinstance(given, list) else [given]
            found.update(number for number in numbers if type(number) is int)
        end = self.token(_name(config.get("eos_token")))
        return frozenset(found if end is None else found | {end})


def _names(vocabulary: dict[str, int], path: Path) -> list[str]:
    """The name of each token; holes have an empty one."""
    names = {token: name for name, token in vocabulary.items()}
    for name, token in vocabulary.items():
        if names[token] != name:
            raise TokenizerError(f"{path}: found {name!r} and {names[token]!r} as token {token}, expected one of them")
    count = max(names, default=-1) + 1
    if count > _MAX_SPREAD * len(names) + _MAX_HOLES:
        raise TokenizerError(f"{path}: found token {count - 1:,}, expected numbers up to the {len(names):,} of tokens")
    return [names.get(token, "") for token in range(count)]


def _text(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error


def _read(path: Path) -> Any:
    """The value that a JSON file holds."""
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; an empty one where there is no such file."""
    found = _read(path) if path.exists() else {}
    if not isinstance(found, dict):
        raise TokenizerError(f"{path}: found {found!r:.100}, expected names and values")
    return found


def _name(token: Any) -> str | None:
    """The name of a token, which files write as text or with attributes."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _kinds(decoder: Any) -> set[str]:
    """The kinds of a decoder and of those it is a sequence of."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*map(_kinds, decoder.get("decoders") or []))
