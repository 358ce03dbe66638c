"""The float64 reference against logits that llama.cpp computed from the same files, and the files themselves."""

from dataclasses import replace

import gguf
import numpy as np
import pytest

from llm.gguf_files import LLAMA_CPP_MODELS, MODELS, random_blocks, write_gguf
from llm.llama_cpp_logits import TOKENS, recorded
from llm.reference_model import ReferenceModel, rotated
from relax_hetero.encoding.block_formats import FILE_FORMATS

KINDS = [name.upper() for name in FILE_FORMATS if name not in ("q1_0", "q2_0")]  # gguf does not dequantize these
# llama.cpp looks GELU up in a table of float16.
TOLERANCES = {name: 5e-3 if name.startswith("gemma") else 5e-5 for name in MODELS}


@pytest.mark.parametrize("name", LLAMA_CPP_MODELS)
def test_reference_computes_what_llama_cpp_does(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name])
    expected = recorded(name)
    assert expected.std() > 0.5
    np.testing.assert_allclose(ReferenceModel(path).logits(TOKENS)[-1], expected, atol=TOLERANCES[name])


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_layer_with_a_window_sees_no_token_before_it(name, tmp_path):
    full = ReferenceModel(write_gguf(tmp_path / "whole.gguf", MODELS[name]))
    windows = [full.window(layer) for layer in range(full.layers)]
    assert windows == ([24, 0, 24] if name == "gemma2" else [24] * 5 + [0, 24])
    first = ReferenceModel(write_gguf(tmp_path / "first.gguf", replace(MODELS[name], layers=1)))
    last = first.logits(TOKENS)[-1]
    for distance, same in ((24, True), (23, False)):
        tokens = [*TOKENS]
        tokens[-1 - distance] = (tokens[-1 - distance] + 1) % 320
        assert np.array_equal(first.logits(tokens)[-1], last) == same


@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks_have_the_spread_that_is_asked_for(kind):
    kind = gguf.GGMLQuantizationType[kind]
    data = random_blocks(kind, 64, 512, 0.05, np.random.default_rng(0))
    weights = gguf.quants.dequantize(data, kind)
    assert weights.shape == (64, 512) and np.isfinite(weights).all()
    assert 0.04 < weights.std() < 0.06 and abs(weights.mean()) < 0.005
    # Scales of MXFP4 are powers of two; blocks of ternary types have a number of each sign.
    assert len(np.unique(weights[:, :32])) > (16 if kind.name in ("MXFP4", "NVFP4") else 64)


def test_blocks_that_are_not_whole_are_refused():
    with pytest.raises(ValueError, match="320 weights are no whole blocks of 256 as Q4_K"):
        random_blocks(gguf.GGMLQuantizationType.Q4_K, 2, 320, 1.0, np.random.default_rng(0))


def test_types_go_by_names_and_norms_stay_float32(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], {"*attn_v*": "Q6_K", "*exps*": "Q4_0", "*": "Q8_0"})
    kinds = {tensor.name.removeprefix("blk.1."): tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["attn_v.weight"] == "Q6_K" and kinds["ffn_up_exps.weight"] == "Q4_0"
    assert kinds["token_embd.weight"] == kinds["attn_q.weight"] == "Q8_0"
    assert kinds["ffn_gate_inp.weight"] == kinds["attn_q_norm.weight"] == kinds["output_norm.weight"] == "F32"


def test_rotation_turns_each_pair_by_the_angle_of_its_row():
    x = np.random.default_rng(0).standard_normal((3, 1, 6))
    angles = np.arange(3)[:, None] * np.array([0.5, 0.1])
    pairs = x[..., 0:4:2] + 1j * x[..., 1:4:2]
    turned = pairs * np.exp(1j * angles)[:, None]
    y = rotated(x, np.cos(angles), np.sin(angles), in_pairs=True)
    np.testing.assert_allclose(y[..., 0:4:2] + 1j * y[..., 1:4:2], turned)
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    halves = rotated(x[..., [0, 2, 1, 3, 4, 5]], np.cos(angles), np.sin(angles), in_pairs=False)
    np.testing.assert_allclose(halves, y[..., [0, 2, 1, 3, 4, 5]])


def test_surprises_are_those_of_the_logits(tmp_path):
    reference = ReferenceModel(write_gguf(tmp_path / "model.gguf", MODELS["gemma2"]))
    logits = reference.logits(TOKENS)[:-1]
    p = np.exp(logits)[np.arange(len(logits)), TOKENS[1:]] / np.exp(logits).sum(axis=1)
    np.testing.assert_allclose(reference.surprises(TOKENS, rows=30), -np.log(p))
