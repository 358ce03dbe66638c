"""Signatures of files by a shared secret key.

A signed file ends with a trailer: the HMAC-SHA256 of everything before it, then `_MAGIC`. The same key signs and
verifies, so only those who distribute files and those who load them may have it.
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
MIN_KEY_BYTES = 16  # minimum length of a key; shorter keys can be guessed

# Domain separation: digests of the same key for other purposes are not valid for files.
_PURPOSE = b"relax_hetero executable 1\n"
_CHUNK_BYTES = 1 << 24


def checked_key(key: object) -> bytes:
    """A key as bytes; BuildError for other types and short keys."""
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise BuildError(f"a key is bytes, got {type(key).__name__}")
    if len(bytes(key)) < MIN_KEY_BYTES:
        raise BuildError(f"a key has at least {MIN_KEY_BYTES} bytes, got {len(bytes(key))}")
    return bytes(key)


def trailer_of(file: BinaryIO, key: bytes) -> bytes:
    """The trailer for a file's bytes from its position to its end."""
    digest = hmac.new(key, _PURPOSE, hashlib.sha256)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.digest() + _MAGIC


def without_trailer(data: np.ndarray) -> np.ndarray:
    """A file's bytes (``uint8``) without the trailer, if any."""
    return data[:-TRAILER_BYTES] if _is_signed(data) else data


def verify(data: np.ndarray, key: bytes, source: str) -> None:
    """Require that a file's bytes (``uint8``, with the trailer) were signed with this key.

    Raises BuildError for another signature, or none; the message names `source`.
    """
    check_signed(data, source)
    content, trailer = data[:-TRAILER_BYTES], data[-TRAILER_BYTES:].tobytes()
    digest = hmac.new(key, _PURPOSE, hashlib.sha256)
    for begin in range(0, content.nbytes, _CHUNK_BYTES):
        digest.update(content[begin : begin + _CHUNK_BYTES].data)
    if not hmac.compare_digest(digest.digest(), trailer[:_DIGEST_BYTES]):
        raise BuildError(changed(source))


def changed(source: str) -> str:
    """The message for a file with a wrong signature."""
    return f"{source}: its signature is not by the key given, or the file was changed since"


def check_signed(data: np.ndarray, source: str) -> None:
    """Require that bytes (``uint8``) end with a trailer; the BuildError names `source`."""
    if not _is_signed(data):
        raise BuildError(f"{source}: found no signature, expected one by the key given: export_library(path, key=...)")


def _is_signed(data: np.ndarray) -> bool:
    return data.nbytes > TRAILER_BYTES and data[-len(_MAGIC) :].tobytes() == _MAGIC
