"""Bytes of CUDA modules as TVM writes them: read, changed to machine code, damaged."""

import struct

import pytest

from relax_hetero.vm.file.cuda_modules import (
    CudaModule,
    read_module,
    read_only_module,
    source_key,
    with_machine_code,
    write_block,
)


def text(data):
    return struct.pack("<Q", len(data)) + data


def numbers(*values):
    return struct.pack(f"<Q{len(values)}Q", len(values), *values)


# Two kernels: three arguments of four bytes, two launch tags, three argument tags; and nothing of all that.
KERNELS = struct.pack("<Q", 2) + b"".join(
    [
        text(b"add") + text(b"add"),
        struct.pack("<Q", 3) + b"\x03\x40\x01\x00" * 3,
        struct.pack("<Q", 2) + text(b"blockIdx.x") + text(b"threadIdx.x"),
        struct.pack("<Q", 3) + bytes(12),
        text(b"empty") + text(b"empty") + struct.pack("<QQQ", 0, 0, 0),
    ]
)
SOURCE = b'extern "C" __global__ void add();'
MODULE = text(b"cuda") + KERNELS + text(SOURCE)
PTX = text(b"ptx") + KERNELS + text(b"/ptx")


def block(*parts):
    content = numbers(0, 1, 2) + numbers(1, 2) + b"".join(parts)
    return text(content)


BLOCK = block(
    text(b"relax.VMExecutable") + text(b"bytecode"),
    text(b"_lib"),
    text(b"cuda") + text(MODULE),
    text(b"cuda") + text(PTX),
)


def test_a_module_is_read():
    module = read_module(MODULE)
    assert (module.format, module.names, module.code) == ("cuda", ("add", "empty"), SOURCE)
    assert module.kernels == KERNELS
    assert module.to_bytes() == MODULE
    assert module.compiled(b"\x7fELF") == CudaModule("cubin", KERNELS, ("add", "empty"), b"\x7fELF")
    assert read_only_module(block(text(b"cuda") + text(MODULE))) == module


def test_sources_in_a_block_become_machine_code():
    actual = with_machine_code(BLOCK, {source_key(SOURCE): b"\x7fELF code"})
    compiled = text(b"cubin") + KERNELS + text(b"\x7fELF code")
    assert actual == block(
        text(b"relax.VMExecutable") + text(b"bytecode"),
        text(b"_lib"),
        text(b"cuda") + text(compiled),
        text(b"cuda") + text(PTX),
    )


def test_sources_that_nobody_compiled_stay():
    """Those of a caller's own module."""
    assert with_machine_code(BLOCK, {}) == BLOCK


@pytest.mark.parametrize("end", [0, 1, 11, 30, len(MODULE) - 1])
def test_bytes_that_end_too_early(end):
    with pytest.raises(ValueError):
        read_module(MODULE[:end])


def test_bytes_of_other_modules():
    with pytest.raises(ValueError):
        read_module(MODULE + b"x")
    with pytest.raises(ValueError):
        with_machine_code(BLOCK[:-1], {source_key(SOURCE): b""})
    with pytest.raises(ValueError, match="'llvm'"):
        read_only_module(block(text(b"llvm") + text(b"")))


def test_assembly_names_the_data_in_any_folder(tmp_path):
    folder = tmp_path / 'a "b" c\\d'
    folder.mkdir()
    assembly = write_block(BLOCK, folder)
    assert (folder / "imports.bin").read_bytes() == BLOCK
    assert '\\"b\\"' in assembly.read_text() and "note.GNU-stack" in assembly.read_text()
