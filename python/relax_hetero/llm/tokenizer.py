"""`rh.llm.Tokenizer`: the tokenizer of a GGUF file.

The packages sentencepiece and tokenizers encode ordinary text. Special tokens are matched here, since the caller
chooses which of them count.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import HeteroError
from .errors import TokenizerError
from .special_tokens import SpecialTokens

if TYPE_CHECKING:
    from ..frontend.gguf.file import GgufFile


# Field numbers of ``sentencepiece_model.proto``. Its message is written here byte by byte: the package's own protobuf
# classes would hold 18 MB for the pieces of Gemma as long as the process lives.

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_BPE = 2
_ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 3, 4, 5
_NUMBER, _BYTES, _FLOAT = 0, 2, 5
"""Wire types of protobuf."""


def sentencepiece_model(names: Sequence[str], scores: Iterable[float], kinds: Iterable[int], has_bytes: bool) -> bytes:
    """Serialize a BPE model of sentencepiece that does not normalize text, except that it escapes spaces.

    Parameters
    ----------
    names, scores, kinds
        Names, scores and kinds of the pieces; kinds are sentencepiece's numbers.
    has_bytes : bool
        Whether characters without a piece become byte tokens.
    """
    data = bytearray()
    for name, score, kind in zip(names, scores, kinds, strict=True):
        text = name.encode()
        piece = b"".join(
            (
                _field(_PIECE, _BYTES),
                _varint(len(text)),
                text,
                _field(_SCORE, _FLOAT),
                struct.pack("<f", score),
                _field(_TYPE, _NUMBER),
                _varint(kind),
            )
        )
        data += _field(_PIECES, _BYTES) + _varint(len(piece)) + piece
    data += _message(_TRAINER, {_MODEL_TYPE: _BPE, _BYTE_FALLBACK: has_bytes})
    data += _message(
        _NORMALIZER, {_ADD_DUMMY_PREFIX: False, _REMOVE_EXTRA_WHITESPACES: False, _ESCAPE_WHITESPACES: True}
    )
    return bytes(data)


def _message(number: int, fields: dict[int, int]) -> bytes:
    body = b"".join(_field(name, _NUMBER) + _varint(value) for name, value in fields.items())
    return _field(number, _BYTES) + _varint(len(body)) + body


def _field(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    """Encode a number as a varint of protobuf."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types of GGUF files, which are sentencepiece's."""

_SPACE = "\u2581"
# Names of tokens that end a turn or a text: files often name only one of them.
ENDS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<eos>",
    "</s>",
    "<EOT>",
    "<|return|>",
    "<|call|>",
}
_ALWAYS_CONTROL = ENDS - {"</s>", "<eos>", "<|end_of_text|>"}
"""Tokens that are control tokens whatever their type in the file, as in llama.cpp; </s> may be a word of HTML."""


def ends_of(names: Container[str]) -> set[str]:
    """The names in `ENDS` that end a turn; in vocabularies with <|return|> (gpt-oss), <|end|> ends a part of one."""
    return {name for name in ENDS if name in names and (name != "<|end|>" or "<|return|>" not in names)}


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_BLANKS}"
_QWEN2 = rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_BLANKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with case, punctuation of ASCII and of Chinese, Chinese and Korean, numbers.
_DEEPSEEK2 = (
    r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}+",
)  # fmt: skip
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Pre-tokenizers of byte-level vocabularies: regular expressions that are applied one after the other (each splits text
# into its matches and the text between them), and the names of GGUF's ``tokenizer.ggml.pre``.
_FAMILIES: dict[tuple[str, ...], tuple[str, ...]] = {
    (_GPT2,): ("gpt-2", "phi-2", "olmo", "mpt", "jais", "roberta-bpe", "trillion"),
    (r"\p{N}", _GPT2): ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
    (_LLAMA3,): ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    (_QWEN2,): ("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"),
    (_TEKKEN,): ("tekken",),
    (_O200K,): ("gpt-4o", "llama4"),
    _DEEPSEEK2: ("deepseek-llm",),
    (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3): ("deepseek-v3",),
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"): ("default",),
}
SPLITS = {name: expressions for expressions, names in _FAMILIES.items() for name in names}

WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "tekken"}
"""Pre-tokenizers whose words become a token whenever there is one, without merges (``ignore_merges``)."""


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
    chat_template : str or None
        Chat template of the file in jinja2, if there is one.
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
        self.names: Sequence[str] = self.texts("tokens")
        kinds = self.numbers("token_type", "kinds") if self._get("token_type", None) is not None else None
        file_kinds = bytes([NORMAL]) * len(self.names) if kinds is None else _check_kinds(kinds)
        pairs = zip(file_kinds, self.names, strict=True)
        self._kinds = bytes(CONTROL if name in _ALWAYS_CONTROL else kind for kind, name in pairs)
        self.begin_id = self._token("bos_token_id")
        self._end_id = self._token("eos_token_id")
        self.adds_end = self._boolean("add_eos_token", False)
        self.chat_template: str | None = fields.get("tokenizer.chat_template")
        model = self._require("model")
        if not isinstance(model, str) or model not in _MODELS:
            raise TokenizerError(f"tokenizer.ggml.model: found {model!r}, expected one of {', '.join(_MODELS)}")
        self.adds_begin = self._boolean("add_bos_token", model == "llama") and self.begin_id is not None
        self._space_prefix = self._boolean("add_space_prefix", True) and model == "llama"
        self._encode_text, self._token_bytes = _MODELS[model](self)
        self._pieces: dict[int, bytes] = {}
        self._user_defined = SpecialTokens(self._tokens_of_kinds(USER_DEFINED))
        self.control_names = frozenset(self._tokens_of_kinds(CONTROL, UNKNOWN))
        self._special = SpecialTokens(self._tokens_of_kinds(USER_DEFINED, CONTROL, UNKNOWN), self.control_names)
        self.stop_ids = self._find_stops()
        # Without byte tokens, sentencepiece turns any number of unknown characters into one token.
        has_bytes = model != "llama" or BYTE in self._kinds
        self.max_token_bytes = max((len(name.encode()) for name in self.names), default=None) if has_bytes else None

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
        return self._tokens_of_kinds(USER_DEFINED, CONTROL, UNKNOWN, NORMAL).get(name)

    # The functions that make the two kinds of tokenizers use the members below.

    def texts(self, key: str) -> Sequence[str]:
        """Read a required list of texts.

        Parameters
        ----------
        key : str
            Key of the file's metadata, without ``tokenizer.ggml.``.
        """
        value = self._require(key)
        is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
        # Sequences other than lists come from a file, whose reader has checked the texts.
        if not is_list or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
            raise TokenizerError(f"tokenizer.ggml.{key}: found {value!r:.100}, expected a list of texts")
        if isinstance(value, list) and any("\ud800" <= character <= "\udfff" for character in "".join(value)):
            raise TokenizerError(f"tokenizer.ggml.{key}: found half of a pair of surrogates, expected text of Unicode")
        return value  # type: ignore[no-any-return]

    def numbers(self, key: str, noun: str) -> np.ndarray:
        """Read a required list with a number for each token.

        Parameters
        ----------
        key : str
            Key of the file's metadata, without ``tokenizer.ggml.``.
        noun : str
            Name of the numbers, for messages.
        """
        value = self._require(key)
        is_list = isinstance(value, np.ndarray) or (
            isinstance(value, list) and all(type(each) in (int, float) for each in value)
        )
        array = np.asarray(value) if is_list else np.empty(0, bool)
        if array.dtype.kind not in "iuf":
            raise TokenizerError(f"tokenizer.ggml.{key}: found {value!r:.100}, expected a list of numbers")
        if len(array) != len(self.names):
            raise TokenizerError(f"found {noun} of {len(array)} tokens, expected {len(self.names)}")
        return array

    @property
    def kinds(self) -> Sequence[int]:
        """Kind of each token."""
        return self._kinds

    @property
    def word_split(self) -> str:
        """Name of the pre-tokenizer."""
        return str(self._get("pre", "default"))

    @property
    def unknown_id(self) -> int | None:
        """Token for unknown text, if there is one."""
        return self._token("unknown_token_id")

    def _get(self, key: str, default: Any) -> Any:
        return self._fields.get(f"tokenizer.ggml.{key}", default)

    def _require(self, key: str) -> Any:
        value = self._get(key, None)
        if value is None:
            raise TokenizerError(f"tokenizer.ggml.{key}: found nothing, expected it in the file's metadata")
        return value

    def _token(self, key: str) -> int | None:
        value = self._get(key, None)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.names):
            raise TokenizerError(f"tokenizer.ggml.{key}: found {value!r}, expected a token below {len(self.names)}")
        return value

    def _boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise TokenizerError(f"tokenizer.ggml.{key}: found {value!r:.100}, expected true or false")
        return value

    def _tokens_of_kinds(self, *kinds: int) -> dict[str, int]:
        return {self.names[token]: token for token, kind in enumerate(self._kinds) if kind in kinds}

    def _find_stops(self) -> frozenset[int]:
        ids = (self._token(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
        control = self._tokens_of_kinds(CONTROL)
        ends = ends_of(control)
        named = (control[name] for name in ends)
        others = {control[name] for name in ENDS - ends if name in control}
        return frozenset(token for token in (*ids, *named) if token is not None) - others


def _check_kinds(kinds: np.ndarray) -> bytes:
    wrong = np.flatnonzero(~np.isin(kinds, range(NORMAL, BYTE + 1)))
    if len(wrong):
        raise TokenizerError(f"tokenizer.ggml.token_type: found {kinds[wrong[0]]}, expected {NORMAL} to {BYTE}")
    return kinds.astype("uint8").tobytes()


_Codec = tuple[Callable[[str], list[int]], Callable[[int], bytes]]
"""Functions that encode a text without special tokens, and return the bytes of a token."""


def _sentencepiece(tokenizer: Tokenizer) -> _Codec:
    """Make a sentencepiece tokenizer, which merges the pair with the best score first."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise TokenizerError(
            "this tokenizer needs the package sentencepiece; pip install 'relax-hetero[llm]'"
        ) from error
    with np.errstate(over="ignore"):
        scores = tokenizer.numbers("scores", "scores").astype("float32")
    if not np.isfinite(scores).all():
        raise TokenizerError(f"tokenizer.ggml.scores: found {scores[~np.isfinite(scores)][0]}, expected finite numbers")
    unknown = tokenizer.unknown_id
    kinds = [UNKNOWN if token == unknown else kind for token, kind in enumerate(tokenizer.kinds)]
    try:
        processor = SentencePieceProcessor(
            model_proto=sentencepiece_model(tokenizer.names, scores, kinds, BYTE in kinds)
        )
    except (RuntimeError, UnicodeEncodeError) as error:
        raise TokenizerError(f"sentencepiece refuses the file's tokens: {error}") from error

    def piece(token: int) -> bytes:
        name = tokenizer.names[token]
        if tokenizer.kinds[token] == BYTE:
            return bytes([int(name[3:5], 16)])
        return name.replace(_SPACE, " ").encode()

    return processor.encode, piece


def _byte_level(tokenizer: Tokenizer) -> _Codec:
    """Make a byte-level BPE tokenizer, which applies merges in the order of the file."""
    try:
        from tokenizers import Regex, models, pre_tokenizers
        from tokenizers import Tokenizer as BpeTokenizer
    except ImportError as error:
        raise TokenizerError("this tokenizer needs the package tokenizers; pip install 'relax-hetero[llm]'") from error
    split = tokenizer.word_split
    if split not in SPLITS:
        raise TokenizerError(f"tokenizer.ggml.pre: found {split!r}, expected one of {', '.join(sorted(SPLITS))}")
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in tokenizer.texts("merges")]
    vocabulary = {name: token for token, name in enumerate(tokenizer.names)}
    if len(vocabulary) != len(tokenizer.names):
        duplicate = next(name for token, name in enumerate(tokenizer.names) if vocabulary[name] != token)
        raise TokenizerError(f"tokenizer.ggml.tokens: found {duplicate!r} twice, expected unique names")
    if split in WHOLE_WORDS:  # text must not become a control token
        vocabulary = {name: token for name, token in vocabulary.items() if tokenizer.kinds[token] != CONTROL}
    with package_errors("tokenizers refuses the file's merges"):
        bpe = BpeTokenizer(models.BPE(vocabulary, merges, ignore_merges=split in WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[split]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    byte_of = byte_of_character()

    def encode(text: str) -> list[int]:
        with package_errors("tokenizers fails on a text"):
            return list(bpe.encode(text, add_special_tokens=False).ids)

    def piece(token: int) -> bytes:
        name = tokenizer.names[token]
        if tokenizer.kinds[token] == USER_DEFINED or any(character not in byte_of for character in name):
            return name.encode()
        return bytes(byte_of[character] for character in name)

    return encode, piece


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


_MODELS: dict[str, Callable[[Tokenizer], _Codec]] = {"llama": _sentencepiece, "gpt2": _byte_level}
