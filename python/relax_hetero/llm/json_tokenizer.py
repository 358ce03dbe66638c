"""`rh.llm.JsonTokenizer`: the tokenizer of a ``tokenizer.json`` next to an ONNX model."""

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
from .tokenizer import byte_of_character, ends_of, package_errors

_SPACE = "\u2581"
_MAX_SPREAD, _MAX_HOLES = 4, 1024
"""Token ids are below this multiple of the number of tokens, plus this number: vocabularies may have holes."""


class JsonTokenizer:
    """Tokenizer of a ``tokenizer.json``, using the package tokenizers.

    Parameters
    ----------
    folder : str or PathLike of str
        Folder with a ``tokenizer.json``, and perhaps ``genai_config.json``, ``tokenizer_config.json`` and others, which
        name the stop tokens.

    Attributes
    ----------
    names
        Names of all tokens.
    control_names
        Names of control tokens, such as the end of a turn, which `encode` recognizes only with ``special=True``.
    stop_ids
        Tokens that end a text or a turn.
    begin_id
        Token for the beginning of a text, if there is one.
    chat_template
        Chat template in jinja2, if there is one.

    Raises
    ------
    TokenizerError
        If the file is missing or damaged, or the package is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder) / "tokenizer.json"
        try:
            import tokenizers
        except ImportError as error:
            raise TokenizerError(f"the package tokenizers is not installed, which reads {path}: {error}") from error
        if not path.exists():
            raise TokenizerError(f"{path}: found no such file, expected a tokenizer next to the model")
        data = _read(path)
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise TokenizerError(f"{path}: found no tokenizer, expected a file that the package tokenizers writes")
        with package_errors(f"{path}: the package tokenizers refuses it"):
            self._with_names, self._as_text = (tokenizers.Tokenizer.from_str(json.dumps(data)) for _ in range(2))
            for tokenizer in (self._with_names, self._as_text):
                tokenizer.no_truncation()
                tokenizer.no_padding()
            self._as_text.encode_special_tokens = True
            vocabulary: dict[str, int] = self._with_names.get_vocab(with_added_tokens=True)
        self.names = _names(vocabulary, path)
        added = data.get("added_tokens") or []
        for token in added:
            name, number = token["content"], token["id"]
            if vocabulary.get(name) != number:
                expected = f"{vocabulary.get(name)} as in the vocabulary"
                raise TokenizerError(f"{path}: found {name!r} as token {number}, expected {expected}")
        self._control = {int(token["id"]): token for token in added if token["special"]}
        self._plain = frozenset(int(token["id"]) for token in added) - self._control.keys()
        control = {self.names[token]: token for token in self._control}
        self.control_names = frozenset(control)
        self._special = SpecialTokens(control, control)
        self._unknown = self.token(_name(data["model"].get("unk_token")))
        self._aliases: tuple[str, Any, dict[int, int]] | None = None
        self._bytes = byte_of_character() if "ByteLevel" in _decoder_types(data.get("decoder")) else None
        config = _read_object(Path(folder) / "tokenizer_config.json")
        self.begin_id = self.token(_name(config.get("bos_token")))
        self.stop_ids = self._find_stops(Path(folder), config)
        template, template_file = config.get("chat_template"), Path(folder) / "chat_template.jinja"
        if template_file.is_file():
            template = _read_text(template_file)
        self.chat_template = template if isinstance(template, str) else None
        for token in (*self.stop_ids, *self.encode("")):
            if not 0 <= token < len(self):
                raise TokenizerError(f"{path}: texts have or end with token {token}, expected one below {len(self)}")

    def __len__(self) -> int:
        return len(self.names)

    def encode(self, text: str, *, special: bool = True, begin: bool = True) -> list[int]:
        """Encode a text.

        Parameters
        ----------
        text : str
            Unicode text.
        special : bool
            Whether names of control tokens in the text become these tokens; in a `Prompt`, only those that the template
            wrote do.
        begin : bool
            Whether to add the tokens for the start and the end of a text that the model expects; a start is not added
            twice.
        """
        with package_errors("the package tokenizers fails on a text"):
            if special and isinstance(text, Prompt):
                tokens = self._encode_prompt(text, begin)
            else:
                tokenizer = self._with_names if special else self._as_text
                tokens = [int(token) for token in tokenizer.encode(text, add_special_tokens=begin).ids]
        is_twice = begin and self.begin_id is not None and tokens[:2] == [self.begin_id] * 2
        return tokens[1:] if is_twice else tokens

    def _encode_prompt(self, prompt: Prompt, begin: bool) -> list[int]:
        """Encode with a tokenizer that knows control tokens only by aliases, which no text contains."""
        if self._aliases is None or self._aliases[0] in prompt:
            self._aliases = self._make_aliases(next(each for each in NONCHARACTERS if each not in prompt))
        marker, tokenizer, tokens = self._aliases
        parts = self._special.split(prompt)
        text = "".join(part if isinstance(part, str) else f"{marker}{part}{marker}" for part in parts)
        encoded = tokenizer.encode(text, add_special_tokens=begin)
        for token, is_added in zip(encoded.ids, encoded.special_tokens_mask, strict=True):
            if token in self._control and token != self._unknown and not is_added:
                raise RequestError(f"messages: found a text that is the control token {self.names[token]!r}")
        return [int(tokens.get(token, token)) for token in encoded.ids]

    def _make_aliases(self, marker: str) -> tuple[str, Any, dict[int, int]]:
        """Make a tokenizer with aliases; return the marker of aliases, the tokenizer, and the token of each alias."""
        from tokenizers import AddedToken, Tokenizer

        tokenizer = Tokenizer.from_str(self._with_names.to_str())
        tokenizer.encode_special_tokens = True
        aliases = {f"{marker}{number}{marker}": token for number, token in self._control.items()}
        tokenizer.add_tokens(
            [AddedToken(alias, lstrip=token["lstrip"], rstrip=token["rstrip"]) for alias, token in aliases.items()]
        )
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        return marker, tokenizer, {vocabulary[alias]: int(token["id"]) for alias, token in aliases.items()}

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens, without control tokens; invalid UTF-8 becomes U+FFFD.

        Parameters
        ----------
        tokens : iterable of int
            Token ids; unknown ones give no text.
        """
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """Bytes that a token adds to a text; empty for control tokens.

        Parameters
        ----------
        token : int
            Token id.
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
        """Token id of a name, such as ``<end_of_turn>``; None if there is none.

        Parameters
        ----------
        name : str or None
            Name of the token; None gives None.
        """
        with package_errors(f"found {name!r:.100} as the name of a token"):
            number = None if name is None else self._with_names.token_to_id(name)
        return None if number is None else int(number)

    def _find_stops(self, folder: Path, config: dict[str, Any]) -> frozenset[int]:
        """Stop tokens that a file names, and tokens whose names are known to end a turn."""
        model = _read_object(folder / "genai_config.json").get("model")
        generation = _read_object(folder / "generation_config.json")
        vocabulary = self._with_names.get_vocab()
        stops: set[int] = {int(vocabulary[name]) for name in ends_of(vocabulary)}
        for ids in (model.get("eos_token_id") if isinstance(model, dict) else None, generation.get("eos_token_id")):
            numbers = ids if isinstance(ids, list) else [ids]
            stops.update(number for number in numbers if type(number) is int)
        end = self.token(_name(config.get("eos_token")))
        return frozenset(stops if end is None else stops | {end})


def _names(vocabulary: dict[str, int], path: Path) -> list[str]:
    """Name of each token; empty for holes."""
    names = {token: name for name, token in vocabulary.items()}
    for name, token in vocabulary.items():
        if names[token] != name:
            raise TokenizerError(f"{path}: found {name!r} and {names[token]!r} as token {token}, expected one of them")
    count = max(names, default=-1) + 1
    if count > _MAX_SPREAD * len(names) + _MAX_HOLES:
        raise TokenizerError(f"{path}: found token {count - 1:,}, expected numbers up to the {len(names):,} of tokens")
    return [names.get(token, "") for token in range(count)]


def _read_text(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error


def _read(path: Path) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; {} if the file does not exist."""
    value = _read(path) if path.exists() else {}
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found {value!r:.100}, expected names and values")
    return value


def _name(token: Any) -> str | None:
    """Name of a token, which files write as text or as an object."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def _decoder_types(decoder: Any) -> set[str]:
    """Types of a decoder and of all its nested decoders."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*map(_decoder_types, decoder.get("decoders") or []))
