"""Executables of language models that are found by file and options, without importing the file again."""

import os

import numpy as np
import pytest

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from relax_hetero.frontend import from_gguf as importer

OPTIONS = {"batches": (1,), "chunks": (16,), "context": 64}
TOKENS = np.arange(3, 15, dtype="int32")


def logits_of(path, *devices, **options):
    model, _ = rh.llm.load(path, *devices, **OPTIONS | options)
    return model.prefill(model.cache.add(), TOKENS).copy()


@pytest.fixture
def imports(monkeypatch, tmp_path):
    """Contexts of imported files."""
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path / "cache"))
    contexts, from_gguf = [], importer.from_gguf

    def counted(*args, **options):
        contexts.append(options["slots"])
        return from_gguf(*args, **options)

    monkeypatch.setattr(importer, "from_gguf", counted)
    return contexts


def test_a_file_is_imported_once(tmp_path, imports):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3"], "Q8_0")
    first = logits_of(path)
    np.testing.assert_array_equal(logits_of(path), first)
    assert len(imports) == 1
    logits_of(path, slots=2)
    assert len(imports) == 2
    os.utime(path)  # may have other weights
    np.testing.assert_array_equal(logits_of(path), first)
    assert len(imports) == 3
    write_gguf(path, MODELS["qwen3"], "Q8_0", 1)
    assert np.abs(logits_of(path) - first).max() > 0.1 and len(imports) == 4


@pytest.mark.slow
def test_rules_count(tmp_path, imports):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3"], "Q8_0")
    for number, layer in enumerate((0, 1, 0)):
        logits_of(path, ["llvm", "llvm"], {f"blk.{layer}.*": "llvm:1", "*": "llvm:0"})
        assert len(imports) == min(number + 1, 2)


def test_an_executable_that_left_the_cache_is_compiled_again(tmp_path, imports):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3"], "Q8_0")
    first = logits_of(path)
    for file in (tmp_path / "cache").rglob("*.so"):
        file.unlink()
    np.testing.assert_array_equal(logits_of(path), first)
    assert len(imports) == 2


@pytest.mark.slow
def test_placement_by_measured_costs_is_chosen_again(tmp_path, imports):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3"], "Q8_0")
    for _ in range(2):
        logits_of(path, ["llvm"], "auto")
    assert len(imports) == 2
