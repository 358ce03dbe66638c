"""Greedy tokens among those that masks allow: any number of rows, any vocabulary, on CPUs and GPUs."""

import numpy as np
import pytest
import tvm
from tvm import relax

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from relax_hetero.encoding.token_masks import (
    full_mask,
    is_allowed,
    pack_mask,
    tokens_of_mask,
    without_tokens,
)
from relax_hetero.frontend.greedy_tokens import masked_tokens
from relax_hetero.target.vdevice import with_vdevices


def module_of(vocabulary, device):
    builder = relax.BlockBuilder()
    function = masked_tokens(builder, vocabulary).with_attr("global_symbol", "main")
    mod = tvm.IRModule({tvm.ir.GlobalVar("main"): function, **builder.get().functions})
    return with_vdevices(mod, [rh.VDevice(device)])


def cases(vocabulary):
    """Logits, allowed tokens, and the largest of them; rows with one allowed token, with all, with ties and a NaN."""
    generator = np.random.default_rng(vocabulary)
    logits = generator.standard_normal((5, vocabulary)).astype("float32")
    logits[3] = np.round(logits[3])
    allowed = generator.random((5, vocabulary)) < 0.1
    allowed[0], allowed[1] = np.arange(vocabulary) == vocabulary - 1, True
    expected = np.where(allowed, logits, -np.inf).argmax(1)
    logits[4, np.flatnonzero(allowed[4])[2]], expected[4] = np.nan, -1
    return logits, np.stack([pack_mask(row) for row in allowed]), expected


@pytest.mark.slow
def test_on_a_cpu():
    logits, masks, expected = cases(1001)
    machine = rh.vm.VirtualMachine(rh.compile(module_of(1001, "llvm"), cache=False))
    for rows in (5, 2):
        assert machine["main"](logits[-rows:], masks[-rows:]).numpy().tolist() == expected[-rows:].tolist()


def test_on_a_gpu():
    logits, masks, expected = cases(320)
    tokens = InterpretedModel(module_of(320, {"kind": "cuda", "arch": "sm_90a"}))(logits, masks)
    assert np.asarray(tokens).tolist() == expected.tolist()


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 262_144])
def test_masks_have_the_tokens_that_were_packed(vocabulary):
    allowed = np.random.default_rng(0).random(vocabulary) < 0.5
    assert tokens_of_mask(full_mask(vocabulary), vocabulary).tolist() == list(range(vocabulary))
    assert tokens_of_mask(pack_mask(allowed), vocabulary).tolist() == np.flatnonzero(allowed).tolist()
    assert tokens_of_mask(~pack_mask(allowed), vocabulary).tolist() == np.flatnonzero(~allowed).tolist()
    for token in {0, vocabulary // 2, vocabulary - 1}:
        assert is_allowed(pack_mask(allowed), token) == allowed[token]
        assert not is_allowed(without_tokens(full_mask(vocabulary), [token, 1 << 30]), token)
    assert np.unpackbits(without_tokens(full_mask(vocabulary), [0]).view("uint8")).sum() == vocabulary - 1
