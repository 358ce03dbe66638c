"""Models of GGUF files against the float64 reference: every architecture, prompts in chunks, then token by token."""

import numpy as np
import pytest

from llm.gguf_files import MODELS, write_gguf
from llm.reference_model import ReferenceModel
from llm.run_gguf import run

TOKENS = np.random.default_rng(1).integers(0, 320, 83)


def check(path, found, tolerance):
    wanted = ReferenceModel(path).logits(TOKENS)
    assert wanted.std() > 0.5
    np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("name", MODELS)
def test_logits(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name])
    check(path, run(path, TOKENS, 13), 2e-4)


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K", "Q6_K"])
def test_logits_of_blocks(kind, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama-tied"], {"*": kind})
    check(path, run(path, TOKENS, 13), 2e-4)


TWO = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}]


@pytest.mark.parametrize(
    "placement",
    [{"blk.0.*": "llvm:1", "output*": "llvm:1"}, {"blk.*.ffn*": "llvm:1"}, {"blk.*.attn*": "llvm:1"}],
    ids=["layers", "feed-forward", "attention"],
)
def test_two_devices(placement, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama-tied"], {"*": "Q8_0"})
    found = run(path, TOKENS, 13, TWO, placement)
    check(path, found, 2e-4)
