"""Metadata of GGUF files: the same as the package gguf reads, with lists as wholes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from relax_hetero.encoding.block_formats import FILE_FORMATS  # noqa: E402
from relax_hetero.errors import FrontendError  # noqa: E402
from relax_hetero.frontend.gguf.file import read_gguf  # noqa: E402


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with values of many types, and a tensor."""
    return written(tmp_path, gguf.GGUFEndian.LITTLE)


def written(tmp_path: Path, order: gguf.GGUFEndian) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", endianess=order)
    writer.add_uint8("small", 7)
    writer.add_int64("large", -(1 << 40))
    writer.add_float32("fraction", 0.25)
    writer.add_bool("yes", True)
    writer.add_string("text", "été 😀")
    writer.add_array("texts", ["", "a", "日本語" * 50, *map(str, range(1000))])
    writer.add_array("numbers", list(range(-5, 300)))
    writer.add_array("few", [1.5, -2.0])
    writer.add_array("truths", [True, False, True])
    writer.add_tensor("weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_fields_are_those_that_the_package_reads(path):
    contents = read_gguf(path)
    reader = gguf.GGUFReader(path)
    assert list(contents.fields) == list(reader.fields)
    for name, field in reader.fields.items():
        expected = field.contents()
        value = contents.fields[name]
        assert (list(value) if isinstance(expected, list) else value) == expected, name
    assert isinstance(contents.fields["few"], list)
    texts = contents.fields["texts"]
    assert texts[-1] == "999" and texts[1:4] == ["a", "日本語" * 50, "0"] and "17" in texts and len(texts) == 1003
    with pytest.raises(IndexError):
        texts[1003]
    np.testing.assert_array_equal(contents.tensors["weight"].data, reader.tensors[0].data)


def test_files_of_another_byte_order_are_refused(tmp_path):
    with pytest.raises(FrontendError, match="its numbers are big-endian"):
        read_gguf(written(tmp_path, gguf.GGUFEndian.BIG))


def test_files_that_end_too_early_are_refused(path):
    data = path.read_bytes()
    for size in (0, 3, 5, 20, 100, 400, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(FrontendError, match="is not a readable GGUF file"):
            read_gguf(path)


def test_a_text_longer_than_its_file_is_refused(path):
    data = bytearray(path.read_bytes())
    offset = data.index("日本語".encode()) - 8
    data[offset : offset + 8] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(FrontendError, match="is not a readable GGUF file"):
        read_gguf(path)


def text(value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def key(name: bytes | str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes | str, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file(keys=(), tensors=(), data: int = 0, version: int = 3, counts: tuple[int, int] | None = None) -> bytes:
    """A file's bytes; `data` bytes of tensors."""
    head = struct.pack("<4sIQQ", b"GGUF", version, *(counts or (len(tensors), len(keys))))
    head += b"".join([*keys, *tensors])
    return head + bytes(-len(head) % 32 + data)


HUGE = struct.pack("<Q", 1 << 60)
ROW = tensor("a", 32)
DAMAGED = {
    "found b'GGML'": b"GGML" + file()[4:],
    "of version 0": file(version=0),
    "of version 1,": file(version=1),
    "of version 99": file(version=99),
    "the number of tensors is 1,152": file(counts=(1 << 60, 0)),
    "the number of keys is 1,152": file(counts=(0, 1 << 60)),
    "found 70,000 tensors": file(counts=(70_000, 0), data=70_000 * 24),
    "found the key 'a' twice": file([key("a", 0, b"a")] * 2),
    "found the key '' as a name": file([key("", 0, b"a")]),
    "the name of a key is not UTF-8": file([key(b"\xff", 0, b"a")]),
    "a is not UTF-8 at byte": file([key("a", 8, text(b"\xc0\x80"))]),
    "a is not UTF-8": file([key("a", 9, struct.pack("<IQ", 8, 1) + text(b"\xed\xa0\x80"))]),
    "a is of type 13": file([key("a", 13, b"a")]),
    "a is a list of type 13": file([key("a", 9, struct.pack("<IQ", 13, 1) + b"a")]),
    "a is a list of type 9": file([key("a", 9, struct.pack("<IQIQ", 9, 1, 0, 0))]),
    "the length of a is 1,152": file([key("a", 9, struct.pack("<I", 0) + HUGE)]),
    "the length of a is 1,152,": file([key("a", 9, struct.pack("<I", 8) + HUGE)]),
    "a ends at byte 1,152": file([key("a", 8, HUGE)]),
    "a is 2, expected 0 or 1": file([key("a", 7, b"\2")]),
    "a has numbers above 1": file([key("a", 9, struct.pack("<IQ", 7, 2) + b"\1\2")]),
    "general.alignment is of type 10": file([key("general.alignment", 10, struct.pack("<Q", 32))]),
    "general.alignment is 0": file([key("general.alignment", 4, bytes(4))]),
    "general.alignment is 48": file([key("general.alignment", 4, struct.pack("<I", 48))]),
    "found the tensor 'a' twice": file(tensors=[ROW] * 2, data=256),
    "of more than 63 bytes": file(tensors=[tensor("a" * 64, 1)], data=4),
    "the name of a tensor is not UTF-8": file(tensors=[tensor(b"\xff", 1)], data=4),
    "has 5 dimensions": file(tensors=[tensor("a", *[1] * 5)], data=4),
    "has 4,294,967,295 dim": file(tensors=[text("a") + b"\xff" * 4], data=99),
    r"has shape \(0, 4\)": file(tensors=[tensor("a", 4, 0)]),
    r"has shape \(1844": file(tensors=[tensor("a", 2**64 - 1)]),
    r"has shape \(4294967296, 4294967296\)": file(tensors=[tensor("a", 1 << 32, 1 << 32)]),
    "tensor 'a' is of type 99": file(tensors=[tensor("a", 32, kind=99)]),
    r"rows of \(33,\) elements, expected a multiple of Q8_0's 32": file(tensors=[tensor("a", 33, kind=8)], data=99),
    "begins at byte 1 of the data, expected 0": file(tensors=[tensor("a", 32, offset=1)], data=256),
    "begins at byte 0 of the data, expected 128": file(tensors=[ROW, tensor("b", 32)], data=256),
    "begins at byte 256 of the data, expected 128": file(tensors=[ROW, tensor("b", 32, offset=256)], data=512),
    "after tensor 'a' of type F16": file(tensors=[tensor("a", 32, kind=1), tensor("b", 32, offset=128)], data=256),
    "begins at byte 18,446": file(tensors=[tensor("a", 32, offset=2**64 - 4096)], data=128),
    "'a' ends at byte 1,152": file(tensors=[tensor("a", 1 << 58)]),
    "'b' ends at byte": file(tensors=[ROW, tensor("b", 32, offset=128)], data=255),
    "expected the end of the file": file(tensors=[tensor("a", 32, kind=1)], data=128),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_files_that_contradict_themselves(message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(DAMAGED[message])
    with pytest.raises(FrontendError, match=f"model.gguf: is not a readable GGUF file: .*{message}"):
        read_gguf(path)


def test_paths_that_are_not_regular_files(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "none", "a\0b"):
        with pytest.raises(FrontendError, match="is not a readable GGUF file"):
            read_gguf(path)


def test_files_of_the_second_version_and_of_few_tensors(tmp_path):
    path = tmp_path / "model.gguf"
    alignment = key("general.alignment", 4, struct.pack("<I", 64))
    tensors = [tensor("a", 3), tensor("b", 1, offset=64), tensor("c", offset=128), tensor("d", 1, 1, 1, 1, offset=192)]
    head = file([alignment], tensors)
    path.write_bytes(file([alignment], tensors, data=-len(head) % 64 + 192 + 4, version=2))
    shapes = {name: found.data.shape for name, found in read_gguf(path).tensors.items()}
    assert shapes == {"a": (3,), "b": (1,), "c": (), "d": (1, 1, 1, 1)}


def test_types_that_the_package_may_lack(tmp_path):
    path, head = tmp_path / "model.gguf", file(tensors=[tensor("a", 128, 3, kind=42)])
    path.write_bytes(head + bytes(-len(head) % 32 + 108))
    found = read_gguf(path).tensors["a"]
    assert found.type == "Q2_0" and found.data.shape == (3, FILE_FORMATS["q2_0"].row_bytes(128))


def test_released_pages_are_read_again(path: Path) -> None:
    """A file takes no memory once its weights are packed, and its tensors keep their bytes."""
    file = read_gguf(path)
    before = {name: tensor.data.tobytes() for name, tensor in file.tensors.items()}
    file.release_pages()
    assert {name: tensor.data.tobytes() for name, tensor in file.tensors.items()} == before
