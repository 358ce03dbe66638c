"""`rh.llm.JsonTokenizer`: the tokenizer of a ``tokenizer.json`` in the folder of a model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from .errors import RequestError, TokenizerError
from .special_tokens import NONCHARACTERS, Prompt, SpecialTokens
from .tokenizer import ALWAYS_CONTROL, byte_of_character, ends_of, package_errors
from .tokenizer_config import TokenizerConfig, content, read_text

_SPACE = "\u2581"
_MAX_SPREAD, _MAX_HOLES = 4, 1024
"""Token ids are below this multiple of the number of tokens, plus this number: vocabularies may have holes."""


class JsonTokenizer:
    """Tokenizer of a ``tokenizer.json``, using the package tokenizers.

    As in Transformers, this file alone says which tokens come before and after a text.

    Parameters
    ----------
    folder : str or PathLike of str
        Folder with a ``tokenizer.json``, and perhaps ``tokenizer_config.json``, ``generation_config.json`` and others,
        which name the stop tokens.

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
    sampling_defaults : dict of str to float
        `SamplingParams` that the model's files recommend.

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
        text = read_text(path)
        data = _parse(text, path)
        with package_errors(f"{path}: the package tokenizers refuses it"):
            self._with_names = tokenizers.Tokenizer.from_str(text)
            self._with_names.no_truncation()
            self._with_names.no_padding()
        added = data.get("added_tokens") or []
        for token in added:
            name, number = token["content"], token["id"]
            if self.token(name) != number:
                expected = f"{self.token(name)} as in the vocabulary"
                raise TokenizerError(f"{path}: found {name!r} as token {number}, expected {expected}")
        vocabulary = _vocabulary(data["model"].get("vocab")) | {token["content"]: token["id"] for token in added}
        self.names = _names(vocabulary, path)
        self._control = {int(token["id"]): token for token in added if token["special"]}
        self._plain = frozenset(int(token["id"]) for token in added) - self._control.keys()
        control = {self.names[token]: token for token in self._control}
        self.control_names = frozenset(control)
        self._special = SpecialTokens(control, control)
        self._unknown = self.token(content(data["model"].get("unk_token")))
        self._aliases: tuple[str, Any, dict[int, int]] | None = None
        self._read_decoder(data.get("decoder"))
        config = TokenizerConfig(Path(folder))
        self.begin_id = self.token(config.name("bos_token") or config.name("cls_token"))
        self.chat_template, self.sampling_defaults = config.chat_template, config.sampling_defaults
        ends = {vocabulary[name] for name in ends_of(self.control_names | ALWAYS_CONTROL & vocabulary.keys())}
        named = {self.token(config.name("eos_token")), *config.end_ids, *ends}
        self.stop_ids = frozenset(token for token in named if token is not None)
        for token in (*self.stop_ids, *self.encode("")):
            if not 0 <= token < len(self):
                raise TokenizerError(f"{path}: texts have or end with token {token}, expected one below {len(self)}")

    def _read_decoder(self, decoder: Any) -> None:
        """Find out how names of tokens become bytes."""
        parts = list(_decoders(decoder))
        self._bytes = byte_of_character() if any(each.get("type") == "ByteLevel" for each in parts) else None
        self._prefixes = [each.get("prefix") for each in parts if each.get("type") == "WordPiece"]
        self._strips_space = bool(self._prefixes) or any(map(_strips_space, parts))

    @cached_property
    def _as_text(self) -> Any:
        """A tokenizer for which names of control tokens are text."""
        return self._copy()

    def _copy(self) -> Any:
        """Make a tokenizer with the same model, for which names of control tokens are text."""
        from tokenizers import Tokenizer

        original = self._with_names
        tokenizer, added = Tokenizer(original.model), sorted(original.get_added_tokens_decoder().items())
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if getattr(original, part) is not None:
                setattr(tokenizer, part, getattr(original, part))
        for is_special, tokens in groupby((token for _, token in added), key=lambda token: bool(token.special)):
            (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(list(tokens))
        tokenizer.encode_special_tokens = True
        return tokenizer

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
        from tokenizers import AddedToken

        tokenizer = self._copy()
        aliases = {f"{marker}{number}{marker}": token for number, token in self._control.items()}
        tokenizer.add_tokens(
            [AddedToken(alias, lstrip=token["lstrip"], rstrip=token["rstrip"]) for alias, token in aliases.items()]
        )
        return marker, tokenizer, {tokenizer.token_to_id(alias): int(token["id"]) for alias, token in aliases.items()}

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens, without control tokens; invalid UTF-8 becomes U+FFFD.

        Parameters
        ----------
        tokens : iterable of int
            Token ids; unknown ones give no text.
        """
        text = b"".join(map(self.piece, tokens)).decode("utf-8", "replace")
        return text[1:] if self._strips_space and text.startswith(" ") else text

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
        for prefix in self._prefixes:
            return name[len(prefix) :].encode() if prefix and name.startswith(prefix) else b" " + name.encode()
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


def _parse(text: str, path: Path) -> dict[str, Any]:
    """Parse the JSON of a tokenizer."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise TokenizerError(f"{path}: found no tokenizer, expected a file that the package tokenizers writes")
    return data


def _vocabulary(vocabulary: Any) -> dict[str, int]:
    """Token of each name of a model: a map, or a list of names with scores."""
    if isinstance(vocabulary, list):
        return {name: token for token, (name, _) in enumerate(vocabulary)}
    return dict(vocabulary or {})


def _names(vocabulary: dict[str, int], path: Path) -> list[str]:
    """Name of each token; empty for holes."""
    names = dict(zip(vocabulary.values(), vocabulary, strict=True))
    if len(names) < len(vocabulary):
        name, token = next((name, token) for name, token in vocabulary.items() if names[token] != name)
        raise TokenizerError(f"{path}: found {name!r} and {names[token]!r} as token {token}, expected one of them")
    count = max(names, default=-1) + 1
    if count > _MAX_SPREAD * len(names) + _MAX_HOLES:
        raise TokenizerError(f"{path}: found token {count - 1:,}, expected numbers up to the {len(names):,} of tokens")
    return [names.get(token, "") for token in range(count)]


def _decoders(decoder: Any) -> Iterator[dict[str, Any]]:
    """Iterate over a decoder and all its nested decoders."""
    if isinstance(decoder, dict):
        yield decoder
        for each in decoder.get("decoders") or []:
            yield from _decoders(each)


def _strips_space(decoder: dict[str, Any]) -> bool:
    """Return whether a decoder drops the space that the tokenizer puts before a text."""
    if decoder.get("type") == "Metaspace":
        return decoder.get("prepend_scheme", "always") != "never" and decoder.get("add_prefix_space") is not False
    return decoder.get("type") == "Strip" and decoder.get("content") == " " and decoder.get("start") == 1
