"""CUDA modules in the form that TVM writes into files, which every TVM runtime with CUDA reads.

Where there is no GPU, TVM can make no module of machine code, only one of source, which a compiler would have to be
there for when it is loaded. Code is therefore put in the source's place in the bytes. Layout, lengths in eight bytes
before all that varies, little endian::

    format | kernels: count, (name, name, argument types, launch tags, argument tags) ... | code

All modules that a library brings along stand in one block: its length, two arrays of the tree of imports, and of each
module its kind and, if it is none of the library's own (``_lib``), its bytes.
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
    """A module of kernels.

    Attributes
    ----------
    format : str
        "cuda" for source, "cubin" for machine code.
    kernels : bytes
        Launch description of each kernel, as TVM writes it.
    names : tuple of str
        Names of the kernels.
    code : bytes
        Source or machine code.
    """

    format: str
    kernels: bytes
    names: tuple[str, ...]
    code: bytes

    def to_bytes(self) -> bytes:
        """The module as TVM writes it."""
        return _text(self.format.encode()) + self.kernels + _text(self.code)

    def compiled(self, code: bytes) -> CudaModule:
        """The same kernels as machine code."""
        return replace(self, format=MACHINE_CODE, code=code)


def read_module(data: bytes) -> CudaModule:
    """The module of bytes that TVM wrote; ValueError where they are none."""
    reader = _Reader(data)
    name = reader.text().decode()
    begin = reader.at
    names = []
    for _ in range(reader.number()):
        names.append(reader.text().decode())
        reader.text()
        reader.skip(reader.number() * _TYPE_BYTES)
        for _ in range(reader.number()):
            reader.text()
        reader.skip(reader.number() * _TAG_BYTES)
    kernels = data[begin : reader.at]
    code = reader.text()
    reader.check_end()
    return CudaModule(name, kernels, tuple(names), code)


def read_only_module(block: bytes) -> CudaModule:
    """The CUDA module of a block that has no other."""
    reader = _block_reader(block)
    kind = reader.text()
    if kind != KIND.encode():
        raise ValueError(f"found a module of kind {kind[:50]!r}, expected 'cuda'")
    data = reader.text()
    reader.check_end()
    return read_module(data)


def source_key(source: bytes) -> str:
    """Key of the machine code of a source."""
    return hashlib.blake2b(source, digest_size=20).hexdigest()


def with_machine_code(block: bytes, cubins: Mapping[str, bytes]) -> bytes:
    """A block in which CUDA modules of source have become modules of machine code.

    Parameters
    ----------
    block : bytes
        As TVM packs the modules that a library imports.
    cubins : mapping of str to bytes
        Machine code by `source_key`. Source without any, which is a caller's own module, stays what it is.
    """
    reader = _block_reader(block)
    parts = [block[_LENGTH.size : reader.at]]
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
    """Assembly that makes a block the data of a library; a C compiler takes it beside objects.

    A compiler would take minutes for as many bytes as numbers of an array.
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
    """Reads bytes in order; ValueError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def number(self) -> int:
        """A length."""
        return int(_LENGTH.unpack(self._take(_LENGTH.size))[0])

    def text(self) -> bytes:
        """A length and as many bytes."""
        return self._take(self.number())

    def skip(self, count: int) -> None:
        """Leave bytes out."""
        self._take(count)

    def is_at_end(self) -> bool:
        """Return whether all was read."""
        return self.at == len(self._data)

    def check_end(self) -> None:
        """ValueError where there is more."""
        if not self.is_at_end():
            raise ValueError(f"{len(self._data) - self.at:,} bytes are left")

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._data):
            raise ValueError(f"{count:,} bytes expected at {self.at:,}, of {len(self._data):,}")
        data, self.at = self._data[self.at : end], end
        return data
