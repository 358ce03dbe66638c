"""`rh.llm.Tokenizer`: the tokenizer of a GGUF file.

The packages sentencepiece and tokenizers encode ordinary text. Special tokens are matched here, since the caller
chooses which of them count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import HeteroError, pip_install
from .errors import TokenizerError
from .params import SamplingParams
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from .sentencepiece_model import BPE, UNIGRAM, check_character_map, sentencepiece_model
from .special_tokens import SpecialTokens

if TYPE_CHECKING:
    from ..frontend.gguf.file import GgufFile


_Row = TypeVar("_Row")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types of GGUF files, which are sentencepiece's."""

_SPACE = "\u2581"
ALWAYS_CONTROL = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> _<EOT> <|return|> <|call|> <|calls|> "
    "<|flush|> <end_of_utterance> <turn|> <|tool_response> <|fim_pad|> <|repo_name|> <|file_sep|> [e~[ "
    "<\uff5cend\u2581of\u2581sentence\uff5c>".split()
)
"""Tokens that are control tokens whatever their type in the file, as in llama.cpp; </s> may be a word of HTML."""
ENDS = ALWAYS_CONTROL | {"</s>", "<eos>", "<|end_of_text|>", "[EOT]", "[EOS]"}
"""Names of tokens that end a turn or a text: files often name only one of them."""
_PARTS_OF_TURNS = {"<|end|>": ("<|return|>", "<|flush|>"), "</s>": ("<|tool_response>",)}
"""Names that do not end a turn in vocabularies with one of the others (gpt-oss and Solar, Gemma 4)."""
_KEEP_SPACES = {"<unk>", "<s>", "<|endoftext|>"}  # control tokens of Phi-3 that keep spaces after them
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")


def ends_of(names: Container[str]) -> set[str]:
    """The names in `ENDS` that end a turn."""
    return {name for name in ENDS if name in names and not any(map(names.__contains__, _PARTS_OF_TURNS.get(name, ())))}


class Tokenizer:
    """Tokenizer of a GGUF file.

    Parameters
    ----------
    fields : mapping of str to object
        Metadata of the file; keys that begin with ``tokenizer.`` are read.

    Attributes
    ----------
    names : sequence of str
        Names of all tokens.
    control_names
        Names of control tokens, such as the end of a turn, which `encode` recognizes only with ``special=True``.
    stop_ids
        Tokens that end a text or a turn.
    begin_id
        Token for the beginning of a text, if there is one.
    adds_begin, adds_end
        Whether the model expects tokens for the beginning and end of a text.
    model, pre_tokenizer
        Rows of the tables `MODELS` and `PRE_TOKENIZERS`.
    chat_template : str or None
        Chat template of the file in jinja2, if there is one.
    sampling_defaults : dict of str to float
        `SamplingParams` that the model's files recommend.
    max_token_bytes : int or None
        Maximum number of bytes of a token; None if there is no limit.

    Raises
    ------
    TokenizerError
        If the file's tokenizer is missing, of an unknown kind or inconsistent, or the required package is not
        installed.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        stored = self._texts("tokens")
        decoded = list(stored)
        self.names: Sequence[str] = [name or f"[EMPTY_{token}]" for token, name in enumerate(decoded)]
        kinds = self._numbers("token_type", "kinds") if self._get("token_type", None) is not None else None
        self._kinds = _check_kinds(np.full(len(stored), NORMAL) if kinds is None else kinds, decoded)
        self.chat_template: str | None = fields.get("tokenizer.chat_template")
        self.sampling_defaults = SamplingParams.defaults_in(fields, "general.sampling")
        model = self.model = _look_up(MODELS, self._require("model"), "tokenizer.ggml.model")
        name = model.pre or (self._get("pre", "default") if model.has_merges else "default")
        pre = self.pre_tokenizer = _look_up(PRE_TOKENIZERS, name, "tokenizer.ggml.pre")
        self.begin_id = self._token("bos_token_id", model.begin_id)
        self._end_id = self._token(model.end_key, model.end_id)
        adds_begin = self._flag(model.begin_flag, model.adds_begin or pre.adds_begin)
        self.adds_begin = adds_begin and self.begin_id is not None
        self.adds_end = self._flag(model.end_flag, model.adds_end) and self._end_id is not None
        self._space_prefix = self._flag(model.space_flag, model.adds_space)
        self._encode_text, self._token_bytes, is_lossless = model.make(self)
        self._pieces: dict[int, bytes] = {}
        user_defined = self._tokens_of_kinds(USER_DEFINED)
        control = self._tokens_of_kinds(CONTROL, UNKNOWN)
        self.control_names = frozenset(control)
        self._user_defined = SpecialTokens(user_defined)
        self._special = SpecialTokens(user_defined | control, self.control_names)
        # Phi-3 drops spaces after control tokens, which only its tokenizer.json says.
        is_phi3 = model is MODELS["llama"] and fields.get("general.architecture") == "phi3"
        self._strips_after = {control[name] for name in self.control_names - _KEEP_SPACES} if is_phi3 else set()
        self.stop_ids = self._find_stops(control)
        self.max_token_bytes = _max_bytes(self.names) if is_lossless else None
        self.names = stored  # those of a file are decoded on access

    @classmethod
    def from_gguf(cls, file: str | os.PathLike[str] | GgufFile) -> Tokenizer:
        """Make the tokenizer of a GGUF file.

        Parameters
        ----------
        file : str or PathLike of str or GgufFile
            Path, or the result of `read_gguf`.

        Raises
        ------
        FrontendError
            If the file cannot be read.
        TokenizerError
            See the constructor.
        """
        from ..frontend.gguf.file import GgufFile, read_gguf

        return cls((file if isinstance(file, GgufFile) else read_gguf(file)).fields)

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
            Whether to add the tokens for the start and the end of a text that the model expects, unless the text has
            them already.
        """
        tokens: list[int] = []
        after_token = True
        for part in (self._special if special else self._user_defined).split(text):
            if isinstance(part, int):
                tokens.append(part)
            else:
                if tokens and tokens[-1] in self._strips_after:
                    part = part.lstrip()
                tokens += self._encode_text(" " + part if self._space_prefix and after_token else part)
            after_token = isinstance(part, int)
        if begin and self.adds_begin and self.begin_id is not None and tokens[:1] != [self.begin_id]:
            tokens.insert(0, self.begin_id)
        if begin and self.adds_end and self._end_id is not None and tokens[-1:] != [self._end_id]:
            tokens.append(self._end_id)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens, without control tokens; invalid UTF-8 becomes U+FFFD.

        Parameters
        ----------
        tokens : iterable of int
            Token ids; unknown ones give no text.
        """
        text = b"".join(map(self.piece, tokens)).decode("utf-8", "replace")
        return text[1:] if self._space_prefix and text.startswith(" ") else text

    def piece(self, token: int) -> bytes:
        """Bytes that a token adds to a text; empty for control tokens.

        Parameters
        ----------
        token : int
            Token id.
        """
        data = self._pieces.get(token)
        if data is None:
            kind = self._kinds[token] if 0 <= token < len(self._kinds) else UNUSED
            data = self._pieces[token] = b"" if kind in (UNKNOWN, CONTROL, UNUSED) else self._token_bytes(token)
        return data

    def token(self, name: str) -> int | None:
        """Token id of a name, such as ``<end_of_turn>``; None if there is none.

        Parameters
        ----------
        name : str
            Name of the token.
        """
        found = (token for token, each in enumerate(self.names) if each == name)
        return next((token for token in found if self._kinds[token] not in (BYTE, UNUSED)), None)

    # The functions that make the kinds of tokenizers use the members below; keys are those of the file's metadata,
    # without ``tokenizer.ggml.``.

    def _texts(self, key: str) -> Sequence[str]:
        """Read a required list of texts."""
        value = self._require(key)
        is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0
        # Sequences other than lists come from a file, whose reader has checked the texts.
        if not is_list or (isinstance(value, list) and not set(map(type, value)) <= {str}):
            raise TokenizerError(f"tokenizer.ggml.{key}: found {value!r:.100}, expected a list of texts")
        if isinstance(value, list):
            try:
                "".join(value).encode()
            except UnicodeEncodeError as error:
                found = "found half of a pair of surrogates"
                raise TokenizerError(f"tokenizer.ggml.{key}: {found}, expected text of Unicode") from error
        return value  # type: ignore[no-any-return]

    def _numbers(self, key: str, noun: str) -> np.ndarray:
        """Read a required list with a number for each token, which messages call `noun`."""
        value = self._require(key)
        is_list = isinstance(value, np.ndarray) or (isinstance(value, list) and set(map(type, value)) <= {int, float})
        array = np.asarray(value) if is_list else np.empty(0, bool)
        if array.dtype.kind not in "iuf":
            raise TokenizerError(f"tokenizer.ggml.{key}: found {value!r:.100}, expected a list of numbers")
        if len(array) != len(self.names):
            raise TokenizerError(f"found {noun} of {len(array)} tokens, expected {len(self.names)}")
        return array

    @property
    def _unknown_id(self) -> int | None:
        """Token for unknown text, if there is one."""
        return self._token("unknown_token_id", self.model.unknown_id)

    def _flag(self, key: str | None, default: bool) -> bool:
        """Read a flag; `default` if there is no key, or the file lacks it."""
        value = default if key is None else self._get(key, default)
        if not isinstance(value, bool):
            raise TokenizerError(f"tokenizer.ggml.{key}: found {value!r:.100}, expected true or false")
        return value

    def _character_map(self) -> bytes:
        """Read the characters' replacements of sentencepiece (``precompiled_charsmap``); empty if there are none."""
        value = self._get("precompiled_charsmap", b"")
        try:
            data = value if isinstance(value, bytes) else np.asarray(value).astype("uint8").tobytes()
            if data:
                check_character_map(data)
        except (TypeError, ValueError, OverflowError, TokenizerError) as error:
            key = "tokenizer.ggml.precompiled_charsmap"
            raise TokenizerError(f"{key}: found {value!r:.100}, expected a map of characters: {error}") from error
        return data

    def _get(self, key: str, default: Any) -> Any:
        return self._fields.get(f"tokenizer.ggml.{key}", default)

    def _require(self, key: str) -> Any:
        value = self._get(key, None)
        if value is None:
            raise TokenizerError(f"tokenizer.ggml.{key}: found nothing, expected it in the file's metadata")
        return value

    def _token(self, key: str, default: int | None = None) -> int | None:
        value = self._get(key, None)
        if value is None:
            return default if default is not None and default < len(self.names) else None
        if type(value) is not int or not 0 <= value < len(self.names):
            raise TokenizerError(f"tokenizer.ggml.{key}: found {value!r}, expected a token below {len(self.names)}")
        return value

    def _tokens_of_kinds(self, *kinds: int) -> dict[str, int]:
        tokens = np.flatnonzero(np.isin(np.frombuffer(self._kinds, "uint8"), kinds)).tolist()
        return {self.names[token]: token for token in tokens}

    def _find_stops(self, control: Mapping[str, int]) -> frozenset[int]:
        ids = (self._token(key, self.model.end_id if key == self.model.end_key else None) for key in _END_KEYS)
        ends = ends_of(control)
        named = (control[name] for name in ends)
        others = {control[name] for name in ENDS - ends if name in control}
        return frozenset(token for token in (*ids, *named) if token is not None) - others


def _look_up(table: Mapping[str, _Row], name: Any, key: str) -> _Row:
    """Return the row of a name that a file has."""
    if not isinstance(name, str) or name not in table:
        known = ", ".join(sorted(table))
        advice = "convert the model with one of them if its words are the same, or load its folder of Hugging Face"
        raise TokenizerError(f"{key}: found {name!r:.100}, expected one of {known}; {advice}")
    return table[name]


def _check_kinds(kinds: np.ndarray, names: Sequence[str]) -> bytes:
    wrong = np.flatnonzero(~np.isin(kinds, range(NORMAL, BYTE + 1)))
    if len(wrong):
        raise TokenizerError(f"tokenizer.ggml.token_type: found {kinds[wrong[0]]}, expected {NORMAL} to {BYTE}")
    checked = bytearray(kinds.astype("uint8").tobytes())
    for token, name in [pair for pair in enumerate(names) if pair[1] in _KNOWN_KINDS]:
        checked[token] = CONTROL if name else UNUSED
    return bytes(checked)


_KNOWN_KINDS = ALWAYS_CONTROL | {""}


def _max_bytes(names: Sequence[str]) -> int:
    """Maximum number of bytes of a name in UTF-8, which takes four for a character at most."""
    longest = max(map(len, names))
    return max(len(name.encode()) for name in names if 4 * len(name) >= longest)


_Codec = tuple[Callable[[str], list[int]], Callable[[int], bytes], bool]
"""Functions that encode a text without special tokens, and return the bytes of a token; whether no text is lost."""


def _sentencepiece(tokenizer: Tokenizer) -> _Codec:
    """Make a sentencepiece tokenizer, which merges the pair with the best score first."""
    encode = _sentencepiece_processor(tokenizer, BPE).encode
    # Without byte tokens, sentencepiece turns any number of unknown characters into one token.
    return encode, partial(_piece_with_spaces, tokenizer), BYTE in tokenizer._kinds


def _as_trained(tokenizer: Tokenizer, model_type: int) -> _Codec:
    """Make a tokenizer of sentencepiece with the normalizer that it was trained with.

    Unigram models take the most probable pieces.
    """
    merges_spaces = tokenizer._flag("remove_extra_whitespaces", False)
    # Texts come with their first space, which sentencepiece removes together with the extra ones.
    add_prefix = merges_spaces and tokenizer._flag("add_space_prefix", False)
    options = {"remove_extra_spaces": merges_spaces, "add_prefix": add_prefix}
    characters = tokenizer._character_map()
    processor = _sentencepiece_processor(tokenizer, model_type, character_map=characters, **options)
    is_lossless = BYTE in tokenizer._kinds and not merges_spaces and not characters
    return processor.encode, partial(_piece_with_spaces, tokenizer), is_lossless


def _plamo(tokenizer: Tokenizer) -> _Codec:
    """Make a tokenizer of PLaMo 2, which takes the most probable pieces of text with spaces."""
    processor = _sentencepiece_processor(tokenizer, UNIGRAM, escape_spaces=False)

    def piece(token: int) -> bytes:
        return _byte(tokenizer, token) or tokenizer.names[token].encode()

    return processor.encode, piece, False


def _sentencepiece_processor(tokenizer: Tokenizer, model_type: int, **options: Any) -> Any:
    """Make a processor of the package sentencepiece."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise TokenizerError(f"this tokenizer needs the package sentencepiece; {pip_install('llm')}") from error
    with np.errstate(over="ignore"):
        scores = tokenizer._numbers("scores", "scores").astype("float32")
    if not np.isfinite(scores).all():
        raise TokenizerError(f"tokenizer.ggml.scores: found {scores[~np.isfinite(scores)][0]}, expected finite numbers")
    kinds = bytearray(tokenizer._kinds)
    if tokenizer._unknown_id is not None:
        kinds[tokenizer._unknown_id] = UNKNOWN
    try:
        return SentencePieceProcessor(
            model_proto=sentencepiece_model(
                tokenizer.names, scores, kinds, BYTE in kinds, model_type=model_type, **options
            )
        )
    except (RuntimeError, UnicodeEncodeError) as error:
        raise TokenizerError(f"sentencepiece refuses the file's tokens: {error}") from error


def _byte(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Byte of a token such as ``<0x0A>``; None for other tokens."""
    name = tokenizer.names[token]
    is_byte = tokenizer._kinds[token] == BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", name)
    return bytes.fromhex(name[3:5]) if is_byte else None


def _piece_with_spaces(tokenizer: Tokenizer, token: int) -> bytes:
    """Bytes of a token whose name has U+2581 for spaces."""
    return _byte(tokenizer, token) or tokenizer.names[token].replace(_SPACE, " ").encode()


def _merges(tokenizer: Tokenizer) -> _Codec:
    """Make a BPE tokenizer, which applies merges in the order of the file to words, of bytes or of characters."""
    row = tokenizer.pre_tokenizer
    package = _tokenizers()
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in tokenizer._texts("merges")]
    vocabulary = _unique_names(tokenizer)
    if row.whole_words or not row.is_byte_level:  # text must not become a control token
        for token in np.flatnonzero(np.frombuffer(tokenizer._kinds, "uint8") == CONTROL).tolist():
            del vocabulary[tokenizer.names[token]]
    with package_errors("tokenizers refuses the file's merges"):
        model = package.models.BPE(
            vocabulary, merges, ignore_merges=row.whole_words, byte_fallback=not row.is_byte_level
        )
        bpe = package.Tokenizer(model)
    bpe.pre_tokenizer = _splitter(package.pre_tokenizers, row, tokenizer.model.drops_spaces)
    if tokenizer.model.drops_spaces and tokenizer._flag("normalizer.lowercase", False):
        bpe.normalizer = package.normalizers.Lowercase()
    encode = _encoder(bpe)
    byte_of = byte_of_character()

    def piece(token: int) -> bytes:
        name = tokenizer.names[token]
        if tokenizer._kinds[token] == USER_DEFINED or any(character not in byte_of for character in name):
            return name.encode()
        return bytes(byte_of[character] for character in name)

    if row.escapes_spaces:
        encode_text, encode = encode, lambda text: encode_text(text.replace(" ", _SPACE))
    if row.is_byte_level:
        return encode, piece, not tokenizer.model.drops_spaces
    return encode, partial(_piece_with_spaces, tokenizer), False


def _splitter(pre_tokenizers: Any, row: PreTokenizer, drops_spaces: bool) -> Any:
    """Make the part of a tokenizer that splits a text into words, and these into bytes."""
    from tokenizers import Regex

    parts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in row.splits]
    if drops_spaces:
        parts.insert(0, pre_tokenizers.WhitespaceSplit())
    if row.is_byte_level:
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(parts)


def _wordpiece(tokenizer: Tokenizer) -> _Codec:
    """Make a tokenizer of BERT, which takes the longest piece of each word.

    Names of first pieces of words begin with U+2581 in GGUF files; in the package, those of others begin with ``##``.
    """
    package = _tokenizers()
    unknown = tokenizer._unknown_id
    if unknown is None:
        raise TokenizerError("tokenizer.ggml.unknown_token_id: found nothing, expected the token of unknown words")
    vocabulary = {
        name[1:] if name.startswith(_SPACE) else f"##{name}": token
        for name, token in _unique_names(tokenizer).items()
        if tokenizer._kinds[token] == NORMAL and token != unknown
    }
    is_lowercase = tokenizer._flag("normalizer.lowercase", True)
    with package_errors("tokenizers refuses the file's tokens"):
        name = tokenizer.names[unknown]
        wordpiece = package.Tokenizer(package.models.WordPiece({**vocabulary, name: unknown}, unk_token=name))
    wordpiece.normalizer = package.normalizers.BertNormalizer(
        lowercase=is_lowercase,
        strip_accents=tokenizer._flag("normalizer.strip_accents", is_lowercase),
        handle_chinese_chars=tokenizer._flag("normalizer.handle_chinese_chars", True),
    )
    wordpiece.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    return _encoder(wordpiece), partial(_piece_with_spaces, tokenizer), False


def _longest_bytes(tokenizer: Tokenizer) -> _Codec:
    """Make a tokenizer of RWKV, which takes the longest token at each byte; names are literals of Python's bytes."""
    names = [_unescape(name) for name in tokenizer.names]
    # Texts and names have a character for each byte; text must not become a control token.
    tokens = SpecialTokens(
        {name.decode("latin-1"): token for token, name in enumerate(names) if tokenizer._kinds[token] == NORMAL}
    )
    unknown = tokenizer._unknown_id

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for part in tokens.split(text.encode().decode("latin-1")):
            ids += [part] if isinstance(part, int) else [unknown] * len(part) if unknown is not None else []
        return ids

    return encode, names.__getitem__, unknown is not None


def _unescape(name: str) -> bytes:
    r"""Bytes of a literal without quotes, such as ``\xe2\n``."""
    escapes = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}

    def value(match: re.Match[bytes]) -> bytes:
        escaped = match[1]
        return bytes.fromhex(escaped[1:].decode()) if len(escaped) == 3 else escapes.get(escaped, escaped)

    return re.sub(rb"\\(x[0-9a-f]{2}|.)", value, name.encode(), flags=re.DOTALL)


def _unique_names(tokenizer: Tokenizer) -> dict[str, int]:
    """Token of each name."""
    vocabulary = dict(zip(tokenizer.names, range(len(tokenizer.names)), strict=True))
    if len(vocabulary) != len(tokenizer.names):
        duplicate = next(name for token, name in enumerate(tokenizer.names) if vocabulary[name] != token)
        raise TokenizerError(f"tokenizer.ggml.tokens: found {duplicate!r} twice, expected unique names")
    return vocabulary


def _tokenizers() -> Any:
    """Import the package tokenizers."""
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(f"this tokenizer needs the package tokenizers; {pip_install('llm')}") from error
    return tokenizers


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Make a function that encodes with a tokenizer of the package tokenizers."""

    def encode(text: str) -> list[int]:
        with package_errors("tokenizers fails on a text"):
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


@contextmanager
def package_errors(context: str) -> Iterator[None]:
    """Turn errors of the package tokenizers, which include Rust panics, into `TokenizerError`."""
    try:
        yield
    except (HeteroError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{context}: {error}") from error


def byte_of_character() -> dict[str, int]:
    """Byte of each character of byte-level tokens, as in GPT-2.

    Bytes that are printable in Latin-1 are the character of the same number, all others are characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


@dataclass(frozen=True)
class _Model:
    """A kind of tokenizer, and what a file that does not say otherwise has."""

    make: Callable[[Tokenizer], _Codec]  # makes the functions that encode and decode
    # Tokens for the start and end of a text and for unknown text.
    begin_id: int | None = None
    end_id: int | None = None
    unknown_id: int | None = None
    end_key: str = "eos_token_id"  # key of the token that is added at the end of a text
    # Whether these tokens, and a space, are added to a text.
    adds_begin: bool = False
    adds_end: bool = False
    adds_space: bool = False
    # Keys of the flags that say otherwise; None if files of this kind are not asked.
    begin_flag: str | None = "add_bos_token"
    end_flag: str | None = "add_eos_token"
    space_flag: str | None = None
    # Whether a pre-tokenizer splits texts into words, and whether spaces between words are dropped.
    has_merges: bool = False
    drops_spaces: bool = False
    pre: str | None = None  # the pre-tokenizer of all files of this kind


_SPACE_FLAG = "add_space_prefix"
_LLAMA: Any = {"adds_begin": True, "adds_space": True, "space_flag": _SPACE_FLAG}
_ALWAYS: Any = {"begin_flag": None, "adds_begin": True}
MODELS: dict[str, _Model] = {
    "llama": _Model(_sentencepiece, 1, 2, 0, **_LLAMA),
    # Models of folders: files of GGUF lack their normalizer, as llama.cpp does.
    "sentencepiece_bpe": _Model(partial(_as_trained, model_type=BPE), 1, 2, 0, **_LLAMA),
    "gpt2": _Model(_merges, has_merges=True),
    "gemma4": _Model(_merges, has_merges=True, pre="gemma4", **_ALWAYS),
    "whitespace": _Model(_merges, has_merges=True, drops_spaces=True),
    "t5": _Model(partial(_as_trained, model_type=UNIGRAM), None, 1, 2, adds_end=True, space_flag=_SPACE_FLAG),
    # Flags of these files are about pairs of texts.
    "bert": _Model(
        _wordpiece, 101, 102, 100, "seperator_token_id", adds_end=True, adds_space=True, end_flag=None, **_ALWAYS
    ),
    "plamo2": _Model(_plamo, 1, 2, 0),
    "rwkv": _Model(_longest_bytes),
}
"""Values of ``tokenizer.ggml.model``."""
