"""Bytes of sentencepiece's models, which are a message of protobuf (``sentencepiece_model.proto``).

The message is written and read here byte by byte: the package's own protobuf classes need the package protobuf, and
would hold 18 MB for the pieces of Gemma as long as the process lives.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import TokenizerError

UNIGRAM, BPE = 1, 2  # types of models: the most probable pieces, or pairs merged by score

# Field numbers of messages.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNKNOWN_ID, _BEGIN_ID, _END_ID = 3, 35, 40, 41, 42
_CHARACTER_MAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 2, 3, 4, 5
_NUMBER, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types of protobuf
_NORMAL = 1  # type of pieces that do not say any
_NODES_AT_ONCE = 4096


def sentencepiece_model(
    names: Sequence[str],  # names of the pieces
    scores: Sequence[float] | np.ndarray,  # their scores
    kinds: Sequence[int],  # their kinds, sentencepiece's numbers
    has_bytes: bool,  # whether characters without a piece become byte tokens
    *,
    model_type: int = BPE,  # `BPE` or `UNIGRAM`
    add_prefix: bool = False,  # whether a space comes before a text
    remove_extra_spaces: bool = False,  # whether spaces at its ends and repeated ones are dropped
    escape_spaces: bool = True,  # whether spaces are U+2581
    # Replacements of characters (``precompiled_charsmap``), which `check_character_map` has checked; empty for none.
    character_map: bytes = b"",
) -> bytes:
    """Serialize a model of sentencepiece."""
    fields = [_field(_PIECES, _BYTES), _field(_PIECE, _BYTES), _field(_SCORE, _FLOAT), _field(_TYPE, _NUMBER)]
    short_piece = b"%b%%c%b%%c%%b%b%%b%b%%c" % tuple(fields)  # lengths below 128 are bytes
    packed_scores = struct.iter_unpack("4s", np.asarray(scores, "<f4").tobytes())
    data = b"".join(
        [
            short_piece % (len(text) + 9, len(text), text, score, kind)
            if len(text) < 119
            else _long_piece(fields, text, score, kind)
            for text, (score,), kind in zip(map(str.encode, names), packed_scores, kinds, strict=True)
        ]
    )
    data += _message(_TRAINER, {_MODEL_TYPE: model_type, _BYTE_FALLBACK: has_bytes})
    normalizer = {
        _ADD_DUMMY_PREFIX: add_prefix,
        _REMOVE_EXTRA_WHITESPACES: remove_extra_spaces,
        _ESCAPE_WHITESPACES: escape_spaces,
    }
    data += _message(_NORMALIZER, normalizer, {_CHARACTER_MAP: character_map})
    return data


def _long_piece(fields: Sequence[bytes], text: bytes, score: bytes, kind: int) -> bytes:
    pieces, name, score_field, type_field = fields
    piece = name + _varint(len(text)) + text + score_field + score + type_field + _varint(kind)
    return pieces + _varint(len(piece)) + piece


def check_character_map(data: bytes) -> None:
    """Check replacements of characters, which sentencepiece follows without checks of its own.

    They are the size of a double array, this array, and texts that end with a zero byte. The array is a trie over
    bytes: the child of node n for byte c is node ``n ^ offset ^ c`` with the label c, and a leaf's child for byte 0
    holds the offset of its text. `data`: the replacements (``precompiled_charsmap``). Raises TokenizerError if the
    array, or an offset in it, ends outside of the data or inside of a character.
    """
    size = int.from_bytes(data[:4], "little")
    texts = data[4 + size :]
    if len(data) < 4 or size % 4 or not size or texts[-1:] != b"\0":
        raise TokenizerError(f"found {len(data)} bytes that begin with {data[:4]!r}, expected a size, nodes and texts")
    units = np.frombuffer(data, "<u4", size // 4, 4)
    begins_character = np.frombuffer(texts, "uint8") & 0xC0 != 0x80
    seen, pending = np.zeros(len(units), bool), np.zeros(1, np.int64)
    while pending.size:
        nodes, pending = pending[:_NODES_AT_ONCE], pending[_NODES_AT_ONCE:]
        unit = units[nodes].astype(np.int64)
        base = nodes ^ ((unit >> 10) << ((unit & 1 << 9) >> 6))
        if (base | 0xFF).max() >= len(units):
            raise TokenizerError(f"found a node with children up to {(base | 0xFF).max()} of {len(units)}")
        offsets = units[base[unit & 1 << 8 != 0]] & 0x7FFFFFFF
        if offsets.size and (offsets.max() >= len(texts) or not begins_character[offsets].all()):
            raise TokenizerError(f"found a text at an offset up to {offsets.max()} of {len(texts)} bytes")
        children = (base[:, None] ^ np.arange(1, 256)).ravel()
        is_child = (units[children] & 0x800000FF) == np.tile(np.arange(1, 256), len(nodes))
        children = np.unique(children[is_child & ~seen[children]])
        seen[children] = True
        pending = np.concatenate([pending, children])


def read_sentencepiece_model(data: bytes) -> dict[str, Any]:
    """Read a model of sentencepiece as metadata under the names of GGUF files.

    `data`: content of a ``tokenizer.model``. Returns the metadata for `Tokenizer`, by key without ``tokenizer.ggml.``.
    Raises TokenizerError if the bytes are not a model, or it neither merges pairs nor is a unigram model.
    """
    try:
        return _read_model(data)
    except (IndexError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise TokenizerError(f"found a damaged model of sentencepiece: {error!r}") from error


def _read_model(data: bytes) -> dict[str, Any]:
    pieces: list[dict[int, Any]] = []
    others: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}}
    for number, value in _fields(data):
        if number == _PIECES:
            pieces.append({_SCORE: 0.0, _TYPE: _NORMAL, **dict(_fields(value))})
        elif number in others:
            others[number].update(_fields(value))
    trainer, normalizer = others[_TRAINER], others[_NORMALIZER]
    names = [piece[_PIECE].decode() for piece in pieces]
    models = {UNIGRAM: "t5", BPE: "sentencepiece_bpe"}
    kind = trainer.get(_MODEL_TYPE, UNIGRAM)
    if kind not in models:
        raise TokenizerError(f"found model type {kind} of sentencepiece, expected {UNIGRAM} (unigram) or {BPE} (BPE)")
    ids = {
        "unknown_token_id": trainer.get(_UNKNOWN_ID, 0),
        "bos_token_id": trainer.get(_BEGIN_ID, 1),
        "eos_token_id": trainer.get(_END_ID, 2),
    }
    return {
        "model": models[kind],
        "tokens": names,
        "scores": [piece[_SCORE] for piece in pieces],
        "token_type": [piece[_TYPE] for piece in pieces],
        "add_space_prefix": bool(normalizer.get(_ADD_DUMMY_PREFIX, True)),
        "remove_extra_whitespaces": bool(normalizer.get(_REMOVE_EXTRA_WHITESPACES, True)),
        "precompiled_charsmap": bytes(normalizer.get(_CHARACTER_MAP, b"")),
        **{key: number for key, number in ids.items() if number < len(names)},
    }


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Iterate over numbers and values of a message's fields."""
    offset = 0
    while offset < len(data):
        key, offset = _read_varint(data, offset)
        kind = key & 7
        if kind == _NUMBER:
            count, offset = _read_varint(data, offset)
            yield key >> 3, count
            continue
        if kind == _BYTES:
            size, offset = _read_varint(data, offset)
        else:
            size = {_DOUBLE: 8, _FLOAT: 4}[kind]
        if offset + size > len(data):
            raise ValueError(f"{size} bytes at {offset} of {len(data)}")
        value = data[offset : offset + size]
        offset += size
        yield key >> 3, struct.unpack("<f", value)[0] if kind == _FLOAT else value


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Read a number at an offset; return it and the offset after it."""
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > 63:
            raise ValueError(f"a number of more than 64 bits at {offset}")


def _message(number: int, numbers: Mapping[int, int], texts: Mapping[int, bytes] | None = None) -> bytes:
    body = b"".join(_field(name, _NUMBER) + _varint(value) for name, value in numbers.items())
    for name, text in (texts or {}).items():
        body += _field(name, _BYTES) + _varint(len(text)) + text
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
