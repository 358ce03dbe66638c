"""Keyed digests of files: whoever has the key can tell that a file is the one that was signed with it.

A signed file ends with a trailer: the HMAC-SHA256 of everything before it, then `_MAGIC`. The same key signs and
verifies, so it is shared by those who distribute files and those who load them, and by nobody else.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import BinaryIO

import numpy as np

from ..errors import BuildError

_MAGIC = b"rlxhsign"
_DIGEST_BYTES = hashlib.sha256().digest_size
TRAILER_BYTES = _DIGEST_BYTES + len(_MAGIC)
MIN_KEY_BYTES = 16
"""Bytes; shorter keys can be guessed."""

# What is signed, lest a digest of the same key for something else is one for a file.
_PURPOSE = b"relax_hetero executable 1\n"
_PIECE = 1 << 24


def checked_key(key: object) -> bytes:
    """A key as bytes; BuildError for what is none, or too short."""
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise BuildError(f"a key is bytes, got {type(key).__name__}")
    if len(bytes(key)) < MIN_KEY_BYTES:
        raise BuildError(f"a key has at least {MIN_KEY_BYTES} bytes, got {len(bytes(key))}")
    return bytes(key)


def trailer_of(file: BinaryIO, key: bytes) -> bytes:
    """The trailer of a file's bytes from its position to its end."""
    digest = hmac.new(key, _PURPOSE, hashlib.sha256)
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.digest() + _MAGIC


def without_trailer(data: np.ndarray) -> np.ndarray:
    """A file's bytes (``uint8``) without the trailer of a signed one."""
    return data[:-TRAILER_BYTES] if _is_signed(data) else data


def verify(data: np.ndarray, key: bytes, source: str) -> None:
    """Refuse bytes of a file (``uint8``, with its trailer) that were not signed with this key.

    Raises
    ------
    BuildError
        Naming `source`: no signature, or another.
    """
    check_signed(data, source)
    content, trailer = data[:-TRAILER_BYTES], data[-TRAILER_BYTES:].tobytes()
    digest = hmac.new(key, _PURPOSE, hashlib.sha256)
    for at in range(0, content.nbytes, _PIECE):
        digest.update(content[at : at + _PIECE].data)
    if not hmac.compare_digest(digest.digest(), trailer[:_DIGEST_BYTES]):
        raise BuildError(changed(source))


def changed(source: str) -> str:
    """The message for a file whose signature does not fit the rest of it."""
    return f"{source}: its signature is not by the key given, or the file was changed since"


def check_signed(data: np.ndarray, source: str) -> None:
    """Refuse bytes (``uint8``) that do not end as a signed file does; BuildError naming `source`."""
    if not _is_signed(data):
        raise BuildError(f"{source}: found no signature, expected one by the key given: export_library(path, key=...)")


def _is_signed(data: np.ndarray) -> bool:
    return data.nbytes > TRAILER_BYTES and data[-len(_MAGIC) :].tobytes() == _MAGIC
