"""A model of sentencepiece as the bytes of its message, without an object for each of its pieces.

The package's own classes for the message take 18 MB of a process for the pieces of Gemma, which it keeps.
Numbers of fields are those of ``sentencepiece_model.proto``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

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
