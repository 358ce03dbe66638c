"""Embeddings of texts against those of `transformers`: encoders, and hidden values of other models."""

import numpy as np
import pytest

import relax_hetero as rh
from llm.architecture_models import ENCODERS, LENGTHS, MODELS, TOKENS, recorded, tensors_of, weights_of, write
from marks import slow_but_for
from relax_hetero.errors import EncoderError
from relax_hetero.frontend.from_gguf import encoder_from_gguf

NAMES = ["<s>", "</s>", "<unk>", "\u2581", *map(chr, range(33, 125))]
VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": NAMES,
    "tokenizer.ggml.scores": [-float(number) for number in range(96)],
    "tokenizer.ggml.token_type": [3, 3, 2, *([1] * 93)],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": True,
}


def file_of(folder, name, models=ENCODERS):
    model = models[name]
    return write(folder / f"{name}.gguf", model, tensors_of(model, weights_of(recorded(name)[0])), fields=VOCABULARY)


@pytest.mark.parametrize("name", slow_but_for(ENCODERS, ["bert"]))
def test_embeddings(name, tmp_path):
    """A text fills a function, another one does not."""
    encoder = rh.llm.Encoder(file_of(tmp_path, name), lengths=(70, 32), activation_bits=16)
    assert encoder.lengths == (32, 70)
    expected = recorded(name)[1]
    actual = np.stack([encoder.embed_tokens(TOKENS[:length]) for length in LENGTHS])
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return rh.llm.Encoder(file_of(tmp_path_factory.mktemp("encoder"), "bert"), lengths=(8,))


def test_texts(encoder):
    """Texts have the tokens for begin and end, and embeddings the length 1."""
    both = encoder.embed(["ab", "c"])
    assert both.shape == (2, 64) and both.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(both, axis=1), 1, rtol=1e-6)
    tokens = [0, *map(NAMES.index, "\u2581ab"), 1]
    np.testing.assert_array_equal(encoder.embed(["ab"], normalize=False)[0], encoder.embed_tokens(tokens))


@pytest.mark.parametrize("texts", ["ab", []])
def test_no_sequence_of_texts(encoder, texts):
    with pytest.raises(rh.HeteroError, match="expected a sequence of texts, at least one"):
        encoder.embed(texts)


def test_texts_that_are_too_long(encoder):
    assert encoder.embed_tokens(range(8)).shape == (64,)
    for tokens in ([], range(9)):
        with pytest.raises(rh.HeteroError, match=f"a text has {len(tokens)} tokens, expected 1 to 8"):
            encoder.embed_tokens(tokens)
    for token in (-1, 1 << 40):
        with pytest.raises(rh.llm.RequestError, match=f"the token {token}, expected 0 to"):
            encoder.embed_tokens([1, token])


@pytest.mark.parametrize("device", ["llvm", {"kind": "cuda", "arch": "sm_90a"}])
def test_attention_is_one_kernel(device, tmp_path):
    """Heads share keys; layers have windows and rotation."""
    mod = encoder_from_gguf(file_of(tmp_path, "gemma-embedding"), [device], lengths=(32,))
    formed = rh.transform.FormAttention()(rh.transform.RealizeVDevice()(mod))
    assert formed.script().count("R.hetero.attention(") == ENCODERS["gemma-embedding"].layers


@pytest.mark.slow
def test_two_devices(tmp_path):
    path, two = file_of(tmp_path, "gemma-embedding"), ["llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}]
    split = rh.llm.Encoder(path, two, {"blk.0.*": "llvm:1", "blk.1.ffn*": "llvm:1"}, lengths=(80,), activation_bits=16)
    expected = recorded("gemma-embedding")[1]
    np.testing.assert_allclose(split.embed_tokens(TOKENS), expected[1], atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_rows_after_a_text_have_no_effect(tmp_path):
    """Queries grow with their positions, which are negative there."""
    path = file_of(tmp_path, "mistral3", MODELS)
    short, long = (rh.llm.Encoder(path, lengths=(length,), activation_bits=16) for length in (20, 32))
    expected = short.embed_tokens(TOKENS[:20])
    np.testing.assert_allclose(long.embed_tokens(TOKENS[:20]), expected, atol=1e-5 * np.abs(expected).max())


def test_what_is_refused(tmp_path):
    with pytest.raises(EncoderError, match="bert encodes texts, expected a model that generates them"):
        rh.from_gguf(file_of(tmp_path, "bert"))
    with pytest.raises(rh.HeteroError, match="expected whole numbers from 1 to the context, 256"):
        encoder_from_gguf(file_of(tmp_path, "gpt2", MODELS), lengths=(257,))
    for lengths in ((), (0,), (8.5,), ("8",), (4096,)):
        with pytest.raises(rh.HeteroError, match="expected whole numbers from 1 to the context, 256"):
            encoder_from_gguf(file_of(tmp_path, "bert"), lengths=lengths)
    with pytest.raises(rh.HeteroError, match="encoders are not placed by cost"):
        rh.llm.Encoder(file_of(tmp_path, "bert"), ["llvm"], "auto")
