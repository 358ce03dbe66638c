"""Attacks on files: from the bytes of a good one, bytes of many bad ones, the same for the same random generator.

Each attack is a function of the seed bytes and a `random.Random`, and yields mutated bytes without end; `attacks_of`
chooses those that fit a kind of file. A reader has to accept what they yield, or refuse it by a `HeteroError`.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from relax_hetero.artifact import container

Attack = Callable[[bytes, random.Random], Iterator[bytes]]

_EXTREMES = (0, 1, -1, 2**7, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64)
ODD_VALUES: tuple[Any, ...] = (
    None, True, "", "\0", "\x1b[31m", "n" * 5000, "+".join(["n"] * 5000), "é", [], {}, [[]], {"kind": "tuple"},
    1.5, float("inf"), *_EXTREMES, 10**400,
)  # fmt: skip


def flipped_bits(seed: bytes, rng: random.Random) -> Iterator[bytes]:
    """One to eight bits are flipped, anywhere."""
    while seed:
        data = bytearray(seed)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield bytes(data)


def truncated(seed: bytes, rng: random.Random) -> Iterator[bytes]:
    """The end is missing."""
    while seed:
        yield seed[: rng.randrange(len(seed))]


def spliced(seed: bytes, rng: random.Random) -> Iterator[bytes]:
    """A piece is taken out, doubled, or replaced by another piece of the same file."""
    while len(seed) > 2:
        begin, end = sorted(rng.sample(range(len(seed)), 2))
        end = min(end, begin + rng.choice((1, 8, 64, 4096)))
        source = rng.randrange(len(seed))
        piece = rng.choice((b"", seed[begin:end] * 2, seed[source : source + end - begin]))
        yield seed[:begin] + piece + seed[end:]


def extreme_words(seed: bytes, rng: random.Random) -> Iterator[bytes]:
    """A word of 4 or 8 bytes becomes an extreme number."""
    while len(seed) >= 8:
        size = rng.choice((4, 8))
        place = rng.randrange(len(seed) - size + 1)
        word = (rng.choice(_EXTREMES) % (1 << (8 * size))).to_bytes(size, "little")
        yield seed[:place] + word + seed[place + size :]


def extreme_varints(seed: bytes, rng: random.Random) -> Iterator[bytes]:
    """A byte becomes an extreme number as protobuf writes it: a length, a size, a field that does not exist."""
    while seed:
        place = rng.randrange(len(seed))
        yield seed[:place] + _varint(rng.choice(_EXTREMES)) + seed[place + 1 :]


def _varint(number: int) -> bytes:
    number %= 1 << 64
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def broken_text(seed: bytes, rng: random.Random) -> Iterator[bytes]:
    """A letter of a name becomes a byte that no UTF-8 has, a NUL, or a command for a terminal."""
    letters = [place for place, byte in enumerate(seed) if chr(byte).isalnum() and byte < 128]
    while letters:
        place = rng.choice(letters)
        yield seed[:place] + rng.choice((b"\xff", b"\xc3", b"\0", b"\x1b", b"\xed")) + seed[place + 1 :]


def forged_headers(seed: bytes, rng: random.Random) -> Iterator[bytes]:
    """A container whose header or metadata has a value replaced, with checksums that are right."""
    for header in _forged(_header_of(seed), rng):
        yield with_header(seed, header)


def forged_metadata(seed: bytes, rng: random.Random) -> Iterator[bytes]:
    """A container whose metadata has a value replaced, with checksums that are right."""
    header = json.loads(_header_of(seed))
    for metadata in _forged(header["metadata"].encode(), rng):
        yield with_header(seed, json.dumps({**header, "metadata": metadata.decode(errors="replace")}).encode())


def forged_footers(seed: bytes, rng: random.Random) -> Iterator[bytes]:
    """A container whose footer has an extreme place, with a checksum that is right."""
    body = container._BODY
    begin = len(seed) - body.size - container._CHECKSUM.size
    while True:
        fields = list(body.unpack(seed[begin : begin + body.size]))
        which = rng.randrange(1, len(fields))
        bits = 32 if which < 4 else 64
        fields[which] = rng.choice((*_EXTREMES, fields[which] + 1, fields[which] - 1)) % (1 << bits)
        packed = body.pack(*fields)
        yield seed[:begin] + packed + container._CHECKSUM.pack(zlib.crc32(packed))


def forged_json(seed: bytes, rng: random.Random) -> Iterator[bytes]:
    """A JSON text with a value replaced, removed or moved."""
    return _forged(seed, rng)


def _header_of(seed: bytes) -> bytes:
    begin, end = _ends(seed)[1:]
    return seed[begin:end]


def _ends(seed: bytes) -> tuple[int, int, int]:
    offset = len(seed) - container._BODY.size - container._CHECKSUM.size
    return container._BODY.unpack(seed[offset : offset + container._BODY.size])[4:]


def with_header(seed: bytes, header: bytes) -> bytes:
    """A container with another header, and the checksums of that."""
    library_end, begin, _ = _ends(seed)
    code_checksum = zlib.crc32(seed[:library_end])
    ends = (library_end, begin, begin + len(header))
    body = container._BODY.pack(container._MAGIC, container.FORMAT_VERSION, code_checksum, zlib.crc32(header), *ends)
    return seed[:begin] + header + body + struct.pack("<I", zlib.crc32(body))


def _forged(text: bytes, rng: random.Random) -> Iterator[bytes]:
    """JSON text with one value replaced, removed or moved; or text that is not JSON at all."""
    document = json.loads(text)
    broken = (
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff" + text,
        text[: len(text) // 2],
        b"null",
        b"[]",
        b"{}",
        b'"a"',
        b"1e999",
    )
    for iteration in itertools.count():
        if iteration % 20 == 19:
            yield rng.choice(broken)
            continue
        data = json.loads(text)
        holder, key = rng.choice(_places(data)) if iteration else (None, None)
        if holder is None:
            data = rng.choice(ODD_VALUES)
        elif rng.random() < 0.2:
            del holder[key]
        elif rng.random() < 0.2:
            other, where = rng.choice(_places(document))
            holder[key] = other[where]
        elif isinstance(holder[key], int) and rng.random() < 0.5:
            holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, *_EXTREMES))
        else:
            holder[key] = rng.choice(ODD_VALUES)
        yield json.dumps(data).encode()


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every list or object inside of data, with each of its indices or keys."""
    places, waiting = [], [data]
    while waiting:
        holder = waiting.pop()
        keys = (
            list(holder) if isinstance(holder, dict) else list(range(len(holder))) if isinstance(holder, list) else []
        )
        places.extend((holder, key) for key in keys)
        waiting.extend(holder[key] for key in keys)
    return places


_ANY_FILE: tuple[Attack, ...] = (flipped_bits, truncated, spliced, extreme_words, broken_text)

ATTACKS: dict[str, tuple[Attack, ...]] = {
    "onnx": (*_ANY_FILE, extreme_varints),
    "container": (*_ANY_FILE, forged_headers, forged_metadata, forged_footers),
    # The code in these files stays intact, so that running an accepted one runs no forged code.
    "container header": (forged_headers, forged_metadata, forged_footers, truncated),
    "text": _ANY_FILE,
    "json": (forged_json,),
}
"""Kinds of files, and the attacks that fit."""


def attacks_of(kind: str, seed: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Names of attacks and mutated bytes, without end, the attacks taking turns."""
    running = {attack.__name__: attack(seed, rng) for attack in ATTACKS[kind]}
    for name in itertools.cycle(running):
        yield name, next(running[name])


def damaged(kind: str, seed: bytes, rng: random.Random) -> tuple[str, bytes]:
    """One of the attacks on files of a kind, and what it makes of the seed: the attacks take turns."""
    return next(itertools.islice(attacks_of(kind, seed, rng), rng.randrange(100), None))
