"""Metadata of GGUF files: the same as the package gguf reads, with lists as wholes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from relax_hetero.errors import FrontendError  # noqa: E402
from relax_hetero.frontend.gguf.file import read_gguf  # noqa: E402


@pytest.fixture(params=[gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG], ids=["little", "big"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with values of many types, and a tensor."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", endianess=request.param)
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
    found = read_gguf(path)
    reader = gguf.GGUFReader(path)
    assert list(found.fields) == list(reader.fields)
    for name, field in reader.fields.items():
        expected = field.contents()
        value = found.fields[name]
        assert (list(value) if isinstance(expected, list) else value) == expected, name
    assert isinstance(found.fields["few"], list)
    texts = found.fields["texts"]
    assert texts[-1] == "999" and texts[1:4] == ["a", "日本語" * 50, "0"] and "17" in texts and len(texts) == 1003
    with pytest.raises(IndexError):
        texts[1003]
    np.testing.assert_array_equal(found.tensors["weight"].data, reader.tensors[0].data)


def test_files_that_end_too_early_are_refused(path):
    data = path.read_bytes()
    for size in (0, 3, 20, 100, 400, len(data) // 2):
        path.write_bytes(data[:size])
        with pytest.raises(FrontendError, match="is no GGUF file that can be read"):
            read_gguf(path)


def test_a_text_longer_than_its_file_is_refused(path):
    data = bytearray(path.read_bytes())
    at = data.index("日本語".encode()) - 8
    data[at : at + 8] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(FrontendError, match="is no GGUF file that can be read"):
        read_gguf(path)
