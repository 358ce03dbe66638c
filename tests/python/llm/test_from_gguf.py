"""Models of GGUF files against the float64 reference: every architecture, prompts in chunks, then token by token."""

import numpy as np
import pytest

from llm.gguf_files import MODELS, write_gguf
from llm.reference_model import ReferenceModel
from llm.run_gguf import run
from marks import slow_but_for

TOKENS = np.random.default_rng(1).integers(0, 320, 83)
EVERY_TYPE = {
    "token_embd*": "Q8_0",
    "*attn_q*": "Q4_0",
    "*attn_k*": "Q4_1",
    "*attn_v*": "Q5_1",
    "*attn_output*": "Q5_K",
    "*ffn_gate*": "Q5_0",
    "*ffn_up*": "Q4_K",
    "*ffn_down*": "Q6_K",
    "*": "F16",
}


def check(path, found, tolerance):
    wanted = ReferenceModel(path).logits(TOKENS)
    assert wanted.std() > 0.5
    np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max())


# The tied llama and the mixture of experts are run with weights in blocks below. The pattern that a file says takes
# three layers, the one that it leaves out seven.
@pytest.mark.parametrize("name", slow_but_for(MODELS, ["llama", "qwen2", "qwen3", "gemma2", "gemma3-pattern"]))
def test_logits(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name])
    check(path, run(path, TOKENS, 13), 2e-4)


EXPERTS = {"*gate_exps*": "Q5_0", "*up_exps*": "Q4_K", "*down_exps*": "Q6_K", "*": "Q8_0"}


@pytest.mark.parametrize(
    ("name", "types", "activation_bits", "tolerance"),
    [("llama-tied", EVERY_TYPE, 16, 5e-4), ("llama-tied", EVERY_TYPE, 8, 4e-2), ("qwen3moe", EXPERTS, 16, 5e-4)],
)
def test_logits_of_blocks(name, types, activation_bits, tolerance, tmp_path):
    """CPUs with dot products of bytes multiply integers of that many bits."""
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], types)
    found = run(path, TOKENS, 13, activation_bits=activation_bits)
    check(path, found, tolerance)


TWO = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}]


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        pytest.param("llama-tied", {"blk.0.*": "llvm:1", "output*": "llvm:1"}, id="layers"),
        pytest.param("qwen3moe", {"*_exps*": "llvm", "*": "llvm:1"}, marks=pytest.mark.slow, id="experts"),
        pytest.param("llama-tied", {"blk.*.ffn*": "llvm:1"}, marks=pytest.mark.slow, id="feed-forward"),
        pytest.param("llama-tied", {"blk.*.attn*": "llvm:1"}, marks=pytest.mark.slow, id="attention"),
    ],
)
def test_two_devices(name, placement, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], {"*": "Q8_0"})
    check(path, run(path, TOKENS, 13, TWO, placement), 2e-4)
