"""TVM's serialized form of CUDA modules, which every TVM runtime with CUDA reads.

Without a GPU TVM can make modules of CUDA source only, which need a compiler when they are loaded. This module replaces
the source by machine code in the serialized bytes. Layout (little endian, an 8-byte length before variable parts)::

    format | kernels: count, (name, name, argument types, launch tags, argument tags) ... | code

All modules that a library imports are in one block: its length, two arrays with the tree of imports, and each module's
kind and, unless it is the library itself (``_lib``), bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

KIND = "cuda"
SOURCE, MACHINE_CODE = "cuda", "cubin"

_LENGTH = struct.Struct("<Q")
_OWN = "_lib"
_TYPE_BYTES = _TAG_BYTES = 4
_SYMBOL = "__tvm_ffi__library_bin"


@dataclass(frozen=True)
class CudaModule:
    """A module of kernels."""

    format: str  # "cuda" for source, "cubin" for machine code
    kernels: bytes  # launch description of each kernel, as TVM writes it
    names: tuple[str, ...]  # names of the kernels
    code: bytes  # source or machine code

    def to_bytes(self) -> bytes:
        """Serialize the module as TVM does."""
        return _text(self.format.encode()) + self.kernels + _text(self.code)

    def compiled(self, code: bytes) -> CudaModule:
        """The same kernels as machine code."""
        return replace(self, format=MACHINE_CODE, code=code)


def read_module(data: bytes) -> CudaModule:
    """Parse a module that TVM serialized; ValueError for malformed bytes."""
    reader = _Reader(data)
    name = reader.text().decode()
    begin = reader.position
    names = []
    for _ in range(reader.number()):
        names.append(reader.text().decode())
        reader.text()
        reader.skip(reader.number() * _TYPE_BYTES)
        for _ in range(reader.number()):
            reader.text()
        reader.skip(reader.number() * _TAG_BYTES)
    kernels = data[begin : reader.position]
    code = reader.text()
    reader.check_end()
    return CudaModule(name, kernels, tuple(names), code)


def read_only_module(block: bytes) -> CudaModule:
    """The only module of a block, which must be a CUDA module."""
    reader = _block_reader(block)
    kind = reader.text()
    if kind != KIND.encode():
        raise ValueError(f"found a module of kind {kind[:50]!r}, expected 'cuda'")
    data = reader.text()
    reader.check_end()
    return read_module(data)


def source_key(source: bytes) -> str:
    """Key of a source, by which its machine code is stored."""
    return hashlib.blake2b(source, digest_size=20).hexdigest()


def with_machine_code(block: bytes, cubins: Mapping[str, bytes]) -> bytes:
    """Replace CUDA modules of source in a block by modules of machine code.

    `block`: serialized modules that a library imports. `cubins`: machine code by `source_key`. Other source, from
    modules of the caller's own, stays.
    """
    reader = _block_reader(block)
    parts = [block[_LENGTH.size : reader.position]]
    while not reader.is_at_end():
        kind = reader.text()
        parts.append(_text(kind))
        if kind == _OWN.encode():
            continue
        data = reader.text()
        if kind == KIND.encode():
            module = read_module(data)
            if module.format == SOURCE and (code := cubins.get(source_key(module.code))) is not None:
                data = module.compiled(code).to_bytes()
        parts.append(_text(data))
    return _text(b"".join(parts))


def write_block(block: bytes, folder: Path) -> Path:
    """Write assembly that includes a block as data of a library, for the linking C compiler.

    Compiling the bytes as a C array would take minutes.
    """
    data, assembly = folder / "imports.bin", folder / "imports.S"
    data.write_bytes(block)
    path = str(data).replace("\\", "\\\\").replace('"', '\\"')
    assembly.write_text(
        f'.section .rodata,"a",@progbits\n.globl {_SYMBOL}\n.type {_SYMBOL},@object\n.balign 64\n'
        f'{_SYMBOL}:\n.incbin "{path}"\n.size {_SYMBOL}, .-{_SYMBOL}\n'
        '.section .note.GNU-stack,"",@progbits\n'
    )
    return assembly


def _block_reader(block: bytes) -> _Reader:
    reader = _Reader(block)
    if reader.number() != len(block) - _LENGTH.size:
        raise ValueError(f"a block of {len(block):,} bytes says that it has another length")
    for _ in range(2):
        reader.skip(reader.number() * _LENGTH.size)
    return reader


def _text(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


class _Reader:
    """Reads bytes in order; ValueError if they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data, self.position = data, 0

    def number(self) -> int:
        """Read a length."""
        return int(_LENGTH.unpack(self._take(_LENGTH.size))[0])

    def text(self) -> bytes:
        """Read a length and as many bytes."""
        return self._take(self.number())

    def skip(self, count: int) -> None:
        """Skip bytes."""
        self._take(count)

    def is_at_end(self) -> bool:
        """Return whether all bytes were read."""
        return self.position == len(self._data)

    def check_end(self) -> None:
        """ValueError if bytes are left."""
        if not self.is_at_end():
            raise ValueError(f"{len(self._data) - self.position:,} bytes are left")

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise ValueError(f"{count:,} bytes expected at {self.position:,}, of {len(self._data):,}")
        data, self.position = self._data[self.position : end], end
        return data
