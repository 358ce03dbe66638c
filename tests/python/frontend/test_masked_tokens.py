"""Greedy tokens among those that masks allow: any number of rows, any vocabulary, on CPUs and GPUs."""

import json

import numpy as np
import pytest
import tvm
from tvm import relax

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from modules import calls_of
from relax_hetero.encoding.token_masks import (
    MASK_BITS,
    full_mask,
    is_allowed,
    mask_words,
    pack_mask,
    tokens_of_mask,
    without_tokens,
)
from relax_hetero.frontend.greedy_tokens import greedy_tokens, masked_tokens
from relax_hetero.target.vdevice import lookup, parse_vdevices, with_vdevices
from relax_hetero.transform.shard.partition_by_mesh import SPLIT_PARAMETERS


def module_of(vocabulary, device):
    builder = relax.BlockBuilder()
    function = masked_tokens(builder, vocabulary).with_attr("global_symbol", "main")
    mod = tvm.IRModule({tvm.ir.GlobalVar("main"): function, **builder.get().functions})
    return with_vdevices(mod, [rh.VDevice(device)])


def greedy_module(logits, kinds):
    """Greedy tokens of a constant and a product with zeros, whose columns the devices of a mesh share."""
    builder, zeros = relax.BlockBuilder(), np.zeros((4, logits.shape[1]), "float32")
    x = relax.Var("x", relax.TensorType([len(logits), 4], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(x, relax.const(zeros)))
            total = builder.emit(rh.op.shard(relax.op.add(product, relax.const(logits)), "S[1]"))
            mesh = lookup(f"vdevice[0:{len(kinds)}]", parse_vdevices(kinds))
            tokens = builder.emit_output(greedy_tokens(builder, total, lambda value, _: builder.emit(value), mesh))
        builder.emit_func_output(tokens)
    return rh.place(builder.get(), {"*": f"vdevice[0:{len(kinds)}]"}, kinds)


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


@pytest.mark.parametrize("devices", [2, 4])
def test_devices_of_a_mesh_search_their_own_logits(devices):
    """Equal logits of several devices, NaN, and infinities; only candidates are exchanged."""
    logits = np.random.default_rng(0).integers(-9, 9, (5, 96)).astype("float32")
    logits[0, [95, 30, 60]], logits[1, [1, 70]], logits[2, 90], logits[3, 40], logits[4] = 10, 11, np.nan, np.inf, -1
    module = greedy_module(logits, [{"kind": "llvm", "num-cores": 1}] * devices)
    tokens = rh.vm.VirtualMachine(rh.compile(module))["main"](np.zeros((5, 4), "float32"))
    assert tokens.numpy().tolist() == [30, 1, -1, -1, 0]
    sent = [call for call in calls_of("relax.to_vdevice", module)]
    shapes = {tuple(int(extent) for extent in call.ty.shape.values) for call in sent}
    assert shapes == {(5, 4), (5, 1, 2)}  # the argument, and the candidates of other devices


@pytest.mark.parametrize(("vocabulary", "is_divided"), [(320, True), (96, False)])
def test_masks_of_logits_in_parts(vocabulary, is_divided):
    """Devices exchange candidates only, if they divide the words of a mask; else the first one, which has it, joins."""
    logits, masks, expected = cases(vocabulary)
    devices, builder = [{"kind": "llvm", "num-cores": 1}] * 2, relax.BlockBuilder()
    mesh = lookup("llvm[0:2]", parse_vdevices(devices))
    arrays = {"logits": logits, "masks": masks} if is_divided else {"logits": logits}
    parts = {name: {"placement": "S[1]", "names": [name, f"{name}@1"], "mesh": [0, 1]} for name in arrays}
    function = masked_tokens(builder, vocabulary, mesh).with_attr(SPLIT_PARAMETERS, json.dumps(parts))
    mod = tvm.IRModule({tvm.ir.GlobalVar("masked_tokens"): function, **builder.get().functions})
    module = rh.place(mod, {"*": "llvm[0:2]"}, devices)
    (sent,) = calls_of("relax.to_vdevice", module)
    assert [int(extent) for extent in sent.ty.shape.values[1:]] == ([1, 2] if is_divided else [48])
    machine = rh.vm.VirtualMachine(rh.compile(module))
    halves = [np.ascontiguousarray(half) for array in arrays.values() for half in np.split(array, 2, axis=1)]
    operands = halves if is_divided else [*halves, masks]
    assert len(machine.executable.signature("masked_tokens").inputs) == len(operands)
    assert machine["masked_tokens"](*operands).numpy().tolist() == expected.tolist()


@pytest.mark.parametrize(("vocabulary", "devices", "parts"), [(128_256, 3, 48), (128_256, 2, 64), (50_257, 2, 32)])
def test_parts_of_a_vocabulary(vocabulary, devices, parts):
    """As many for each GPU, if they divide the vocabulary, whose last word is filled."""
    builder = relax.BlockBuilder()
    mesh = lookup(f"cuda[0:{devices}]", parse_vdevices([{"kind": "cuda", "arch": "sm_90a"}] * devices))
    (top,) = calls_of("relax.topk", masked_tokens(builder, vocabulary, mesh))
    whole_words = MASK_BITS * mask_words(vocabulary)
    assert [int(extent) for extent in top.args[0].ty.shape.values[1:]] == [parts, whole_words // parts]
