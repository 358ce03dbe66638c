"""`rh.llm.Tokenizer`: text as tokens and back, as a GGUF file describes it.

The work is that of the packages sentencepiece and tokenizers, which are told what the file says. Names of control
tokens are found here, since which of them count is the caller's choice.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import HeteroError
from .errors import TokenizerError
from .special_tokens import SpecialTokens

if TYPE_CHECKING:
    from ..frontend.gguf.file import GgufFile


# A model of sentencepiece as the bytes of its message, without an object for each of its pieces.
#
# The package's own classes for the message take 18 MB of a process for the pieces of Gemma, which it keeps.
# Numbers of fields are those of ``sentencepiece_model.proto``.

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_BPE = 2
_ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 3, 4, 5
_NUMBER, _BYTES, _FLOAT = 0, 2, 5
"""Kinds of fields on the wire."""


def model_bytes(names: Sequence[str], scores: Iterable[float], kinds: Iterable[int], has_bytes: bool) -> bytes:
    """A model whose pieces are joined by their scores, with text as it is: only blanks have a character of their own.

    Parameters
    ----------
    names, scores, kinds
        Names, scores and kinds of the pieces; kinds have sentencepiece's numbers.
    has_bytes : bool
        Whether characters without a piece become bytes.
    """
    found = bytearray()
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
        found += _field(_PIECES, _BYTES) + _varint(len(piece)) + piece
    found += _message(_TRAINER, {_MODEL_TYPE: _BPE, _BYTE_FALLBACK: has_bytes})
    found += _message(
        _NORMALIZER, {_ADD_DUMMY_PREFIX: False, _REMOVE_EXTRA_WHITESPACES: False, _ESCAPE_WHITESPACES: True}
    )
    return bytes(found)


def _message(number: int, fields: dict[int, int]) -> bytes:
    body = b"".join(_field(name, _NUMBER) + _varint(value) for name, value in fields.items())
    return _field(number, _BYTES) + _varint(len(body)) + body


def _field(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens, with their numbers in files, which are those of sentencepiece."""

_SPACE = "\u2581"
# Names of tokens that end a turn or a text, where a file tells one such token only.
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
}
_ALWAYS_CONTROL = ENDS - {"</s>", "<eos>", "<|end_of_text|>"}
"""Names of control tokens whatever a file says, as in llama.cpp; a vocabulary of HTML has </s> as a word."""

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

# How byte-level vocabularies cut text into words before merging bytes, by the names that GGUF files give: expressions
# that are applied one after the other; each makes words of its matches and of the text between them.
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
"""Vocabularies in which a word that is a token becomes that token, whatever merges say."""


class Tokenizer:
    """Text as tokens and back.

    Parameters
    ----------
    fields : mapping of str to object
        The file's metadata by key, of which those that begin with ``tokenizer.`` are read.

    Attributes
    ----------
    names : sequence of str
        Names of all tokens.
    control_names
        Names of tokens that a text has only where `encode` is told so, such as the end of a turn.
    stop_ids
        Tokens that end a text or a turn.
    begin_id
        The token for the begin of a text; None if there is none.
    adds_begin, adds_end
        Whether the model wants tokens for the begin and end of a text.
    chat_template : str or None
        Chat template of the file, in the language of jinja2; None if it has none.
    max_token_bytes : int or None
        No token stands for more bytes of a text; None if one may stand for any number of them.

    Raises
    ------
    TokenizerError
        If the file describes no tokenizer, one of a kind that is not known, or one that contradicts itself; or if the
        package that does the work is not installed.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.names: Sequence[str] = self.texts("tokens")
        kinds = self.numbers("token_type", "kinds") if self._get("token_type", None) is not None else None
        given = bytes([NORMAL]) * len(self.names) if kinds is None else _checked_kinds(kinds)
        named = zip(given, self.names, strict=True)
        self._kinds = bytes(CONTROL if name in _ALWAYS_CONTROL else kind for kind, name in named)
        self.begin_id = self._token("bos_token_id")
        self._end_id = self._token("eos_token_id")
        self.adds_end = self._truth("add_eos_token", False)
        self.chat_template: str | None = fields.get("tokenizer.chat_template")
        model = self._need("model")
        if not isinstance(model, str) or model not in _MODELS:
            raise TokenizerError(f"tokenizer.ggml.model: found {model!r}, expected one of {', '.join(_MODELS)}")
        self.adds_begin = self._truth("add_bos_token", model == "llama") and self.begin_id is not None
        self._space_prefix = self._truth("add_space_prefix", True) and model == "llama"
        self._words, self._bytes = _MODELS[model](self)
        self._pieces: dict[int, bytes] = {}
        self._always = SpecialTokens(self._of_kinds(USER_DEFINED))
        self.control_names = frozenset(self._of_kinds(CONTROL, UNKNOWN))
        self._special = SpecialTokens(self._of_kinds(USER_DEFINED, CONTROL, UNKNOWN), self.control_names)
        self.stop_ids = self._find_stops()
        # Without bytes as tokens, sentencepiece makes one of all characters in a row that it has none for.
        has_bytes = model != "llama" or BYTE in self._kinds
        self.max_token_bytes = max((len(name.encode()) for name in self.names), default=None) if has_bytes else None

    @classmethod
    def from_gguf(cls, file: str | os.PathLike[str] | GgufFile) -> Tokenizer:
        """The tokenizer of a GGUF file, given by its path or opened already.

        Parameters
        ----------
        file : str or PathLike of str or GgufFile
            Path, or the file as `read_gguf` returns it.

        Raises
        ------
        FrontendError
            If the file cannot be read.
        TokenizerError
            If the file describes no tokenizer, as the constructor says.
        """
        from ..frontend.gguf.file import GgufFile, read_gguf

        return cls((file if isinstance(file, GgufFile) else read_gguf(file)).fields)

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
            Whether the model's tokens for the begin and the end of a text are added, where it wants them; not twice
            where the text has them already.
        """
        tokens: list[int] = []
        after_token = True
        for part in (self._special if special else self._always).split(text):
            if isinstance(part, int):
                tokens.append(part)
            else:
                tokens += self._words(" " + part if self._space_prefix and after_token else part)
            after_token = isinstance(part, int)
        if begin and self.adds_begin and self.begin_id is not None and tokens[:1] != [self.begin_id]:
            tokens.insert(0, self.begin_id)
        if begin and self.adds_end and self._end_id is not None and tokens[-1:] != [self._end_id]:
            tokens.append(self._end_id)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, control tokens left out; bytes that are no UTF-8 become U+FFFD.

        Parameters
        ----------
        tokens : iterable of int
            Numbers of tokens; those that are not in the vocabulary give no text.
        """
        text = b"".join(map(self.piece, tokens)).decode("utf-8", "replace")
        return text[1:] if self._space_prefix and text.startswith(" ") else text

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; none for control tokens.

        Parameters
        ----------
        token : int
            Number of the token.
        """
        found = self._pieces.get(token)
        if found is None:
            kind = self._kinds[token] if 0 <= token < len(self._kinds) else UNUSED
            found = self._pieces[token] = b"" if kind in (UNKNOWN, CONTROL, UNUSED) else self._bytes(token)
        return found

    def token(self, name: str) -> int | None:
        """The token of a name, such as ``<end_of_turn>``; None if there is none.

        Parameters
        ----------
        name : str
            Text of the token.
        """
        return self._of_kinds(USER_DEFINED, CONTROL, UNKNOWN, NORMAL).get(name)

    # What follows serves the makers of the two kinds below.

    def texts(self, key: str) -> Sequence[str]:
        """A list of texts that the file has to have.

        Parameters
        ----------
        key : str
            Key of the file's metadata, without ``tokenizer.ggml.``.
        """
        found = self._need(key)
        is_list = isinstance(found, Sequence) and not isinstance(found, str) and len(found) > 0
        # Lists that are none of Python's are a file's, whose texts were looked at when it was read.
        if not is_list or (isinstance(found, list) and not all(isinstance(each, str) for each in found)):
            raise TokenizerError(f"tokenizer.ggml.{key}: found {found!r:.100}, expected a list of texts")
        if isinstance(found, list) and any("\ud800" <= character <= "\udfff" for character in "".join(found)):
            raise TokenizerError(f"tokenizer.ggml.{key}: found half of a pair of surrogates, expected text of Unicode")
        return found  # type: ignore[no-any-return]

    def numbers(self, key: str, what: str) -> np.ndarray:
        """A number of each token, which the file has to have.

        Parameters
        ----------
        key : str
            Key of the file's metadata, without ``tokenizer.ggml.``.
        what : str
            Name of the numbers, for messages.
        """
        found = self._need(key)
        is_list = isinstance(found, np.ndarray) or (
            isinstance(found, list) and all(type(each) in (int, float) for each in found)
        )
        array = np.asarray(found) if is_list else np.empty(0, bool)
        if array.dtype.kind not in "iuf":
            raise TokenizerError(f"tokenizer.ggml.{key}: found {found!r:.100}, expected a list of numbers")
        if len(array) != len(self.names):
            raise TokenizerError(f"found {what} of {len(array)} tokens, expected {len(self.names)}")
        return array

    @property
    def kinds(self) -> Sequence[int]:
        """The kind of each token."""
        return self._kinds

    @property
    def word_split(self) -> str:
        """The name of the file's way to cut text into words."""
        return str(self._get("pre", "default"))

    @property
    def unknown_id(self) -> int | None:
        """The token for what has no token."""
        return self._token("unknown_token_id")

    def _get(self, key: str, default: Any) -> Any:
        return self._fields.get(f"tokenizer.ggml.{key}", default)

    def _need(self, key: str) -> Any:
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

    def _truth(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise TokenizerError(f"tokenizer.ggml.{key}: found {value!r:.100}, expected true or false")
        return value

    def _of_kinds(self, *kinds: int) -> dict[str, int]:
        return {self.names[token]: token for token, kind in enumerate(self._kinds) if kind in kinds}

    def _find_stops(self) -> frozenset[int]:
        told = (self._token(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
        named = (token for name, token in self._of_kinds(CONTROL).items() if name in ENDS)
        return frozenset(token for token in (*told, *named) if token is not None)


def _checked_kinds(kinds: np.ndarray) -> bytes:
    wrong = np.flatnonzero(~np.isin(kinds, range(NORMAL, BYTE + 1)))
    if len(wrong):
        raise TokenizerError(f"tokenizer.ggml.token_type: found {kinds[wrong[0]]}, expected {NORMAL} to {BYTE}")
    return kinds.astype("uint8").tobytes()


_Tokenizers = tuple[Callable[[str], list[int]], Callable[[int], bytes]]
"""Tokens of a text without special ones, and bytes of a token."""


def _sentencepiece(tokenizer: Tokenizer) -> _Tokenizers:
    """Pieces with scores, of which the best pair is joined first; characters without a piece become bytes."""
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
        processor = SentencePieceProcessor(model_proto=model_bytes(tokenizer.names, scores, kinds, BYTE in kinds))
    except (RuntimeError, UnicodeEncodeError) as error:
        raise TokenizerError(f"sentencepiece refuses the file's tokens: {error}") from error

    def piece(token: int) -> bytes:
        name = tokenizer.names[token]
        if tokenizer.kinds[token] == BYTE:
            return bytes([int(name[3:5], 16)])
        return name.replace(_SPACE, " ").encode()

    return processor.encode, piece


def _byte_level(tokenizer: Tokenizer) -> _Tokenizers:
    """Bytes of words, which merges join in their order."""
    try:
        from tokenizers import Regex, models, pre_tokenizers
        from tokenizers import Tokenizer as Words
    except ImportError as error:
        raise TokenizerError("this tokenizer needs the package tokenizers; pip install 'relax-hetero[llm]'") from error
    split = tokenizer.word_split
    if split not in SPLITS:
        raise TokenizerError(f"tokenizer.ggml.pre: found {split!r}, expected one of {', '.join(sorted(SPLITS))}")
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in tokenizer.texts("merges")]
    vocabulary = {name: token for token, name in enumerate(tokenizer.names)}
    if len(vocabulary) != len(tokenizer.names):
        twice = next(name for token, name in enumerate(tokenizer.names) if vocabulary[name] != token)
        raise TokenizerError(f"tokenizer.ggml.tokens: found {twice!r} twice, expected names that differ")
    if split in WHOLE_WORDS:  # no word is a control token
        vocabulary = {name: token for name, token in vocabulary.items() if tokenizer.kinds[token] != CONTROL}
    with package_errors("tokenizers refuses the file's merges"):
        words = Words(models.BPE(vocabulary, merges, ignore_merges=split in WHOLE_WORDS))
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[split]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    byte_of = byte_of_character()

    def encode(text: str) -> list[int]:
        with package_errors("tokenizers fails on a text"):
            return list(words.encode(text, add_special_tokens=False).ids)

    def piece(token: int) -> bytes:
        name = tokenizer.names[token]
        if tokenizer.kinds[token] == USER_DEFINED or any(character not in byte_of for character in name):
            return name.encode()
        return bytes(byte_of[character] for character in name)

    return encode, piece


@contextmanager
def package_errors(what: str) -> Iterator[None]:
    """Errors of the package tokenizers, which raises plain ones and its language's panics, as `TokenizerError`."""
    try:
        yield
    except (HeteroError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{what}: {error}") from error


def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for.

    Bytes that are printable in Latin-1 stand for themselves, the others for characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_MODELS: dict[str, Callable[[Tokenizer], _Tokenizers]] = {"llama": _sentencepiece, "gpt2": _byte_level}
