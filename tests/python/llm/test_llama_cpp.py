"""How far llama.cpp is from the float64 reference, for every block type: that is what block types allow.

Its products round activations to 8 bits in blocks of 32 (of 256 for K types), to bfloat16 or float16 for weights of
those types. On random weights errors add up as they seldom do in trained models.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from llm.gguf_files import LLAMA_CPP_MODELS, MODELS, write_gguf
from llm.llama_cpp_logits import TOKENS, fresh, recorded
from llm.reference_model import ReferenceModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python"),
]

# Root mean square of the error over that of the logits, as measured on the small models (0.0003 to 0.07), doubled.
# Mixtures of experts are apart: a token whose last expert is nearly tied takes another one.
ERRORS = {"F32": 1e-3, "F16": 2e-3, "BF16": 1.5e-2, "Q6_K": 8e-2}
OF_OTHERS, OF_EXPERTS = 5e-2, 1.5e-1
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LLAMA_CPP_MODELS)
def test_llama_cpp_is_as_near_as_its_activations_allow(name, kind, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], kind)
    expected = ReferenceModel(path).logits(TOKENS)
    error = np.sqrt(np.mean((fresh(path, TOKENS) - expected) ** 2) / np.mean(expected**2))
    quantized = kind not in ("F32", "F16", "BF16")
    rounded = kind == "BF16" or quantized
    allowed = OF_EXPERTS if rounded and MODELS[name].experts else ERRORS.get(kind, OF_OTHERS)
    if MODELS[name].latent:  # queries and values of heads are products of rounded products
        allowed *= 2
    assert error < allowed
    assert not quantized or error > 1e-3, "its activations have become more exact"


@pytest.mark.parametrize("name", LLAMA_CPP_MODELS)
def test_recorded_logits_are_those_of_llama_cpp(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name])
    np.testing.assert_allclose(recorded(name), fresh(path, TOKENS)[-1], atol=2e-4)  # builds differ
