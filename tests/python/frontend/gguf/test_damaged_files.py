"""GGUF files that are cut off or have wrong bytes: an error of the library, soon, or a module."""

import numpy as np
import pytest

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from relax_hetero.errors import FrontendError, HeteroError
from relax_hetero.llm import Tokenizer, TokenizerError


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", MODELS["gemma2"]).read_bytes()


def after(file: bytes, key: str) -> int:
    """Where the value of a key begins, behind the key's name and its type."""
    return file.index(key.encode()) + len(key) + 4


def test_a_file_that_ends_early(file, tmp_path):
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 8, 23, 24, 100, 5000, len(file) // 2, len(file) - 1):
        path.write_bytes(file[:length])
        with pytest.raises(FrontendError, match="cut.gguf"):
            rh.from_gguf(path)


def test_more_layers_than_any_model_has(file, tmp_path):
    at = after(file, "gemma2.block_count")
    path = tmp_path / "layers.gguf"
    path.write_bytes(file[:at] + (1 << 31).to_bytes(4, "little") + file[at + 4 :])
    with pytest.raises(FrontendError, match="gemma2.block_count is 2,147,483,648, expected 10,000 at most"):
        rh.from_gguf(path)


def test_a_kind_of_token_that_is_none(file, tmp_path):
    at = after(file, "tokenizer.ggml.token_type") + 12  # the list's type and length
    path = tmp_path / "kinds.gguf"
    path.write_bytes(file[:at] + (99).to_bytes(4, "little") + file[at + 4 :])
    with pytest.raises(TokenizerError, match="token_type: found 99, expected 1 to 6"):
        Tokenizer.from_gguf(path)


def test_wrong_bytes(file, tmp_path):
    path, generator = tmp_path / "wrong.gguf", np.random.default_rng(5)
    refused = 0
    for _ in range(60):
        data = bytearray(file)
        for at in generator.integers(0, 3000, 3):
            data[at] = generator.integers(256)
        path.write_bytes(data)
        for read in (lambda: rh.from_gguf(path, context=128), lambda: Tokenizer.from_gguf(path)):
            try:
                read()
            except HeteroError:
                refused += 1
    assert refused > 20
