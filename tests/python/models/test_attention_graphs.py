"""Attention as exporters write it: found, computed in one kernel, with ONNX Runtime's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm

import relax_hetero as rh
from models.attention_graphs import FORMS, bert
from modules import calls_of, ops_of
from relax_hetero.op.attention import ATTENTION
from relax_hetero.target.vdevice import same_vdevice
from relax_hetero.transform.fuse.form_attention import form_attention
from seeds import fresh_rng

AVX512 = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}


def attentions(mod: tvm.IRModule) -> list[Any]:
    return calls_of(ATTENTION, mod)


def random_inputs(model: onnx.ModelProto, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    rng = fresh_rng()
    inputs = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in tensor.shape.dim]
        array = rng.standard_normal(shape).astype("float32")
        if tensor.elem_type == onnx.TensorProto.BOOL:
            array = array > 0
            array[:, :, 1] = False
        inputs[value.name] = array
    return inputs


def check(model: onnx.ModelProto, vdevices: list[Any], sizes: dict[str, int] | None = None, **options: Any) -> None:
    inputs = random_inputs(model, sizes or {})
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, inputs)
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, vdevices=vdevices, **options)))
    actual = machine["main"](**inputs)
    actual = actual if isinstance(actual, tuple) else (actual,)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_found(name: str) -> None:
    mod = rh.transform.RealizeVDevice()(rh.from_onnx(FORMS[name](), vdevices=[AVX512]))
    formed = form_attention(mod)
    assert len(attentions(formed)) == 1
    assert form_attention(formed) is formed
    moved = ops_of(formed)
    assert "relax.nn.softmax" not in moved
    # The past of gpt2 is a result, so that its heads are laid out whatever reads them.
    assert name == "gpt2" or "relax.permute_dims" not in moved


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_results_of_onnx_runtime(name: str) -> None:
    check(FORMS[name](), ["llvm"])


def test_symbolic_batch_and_tokens() -> None:
    check(bert("tokens", "batch"), ["llvm"], {"tokens": 23, "batch": 2})


def test_attention_on_one_device_and_the_rest_on_another() -> None:
    model = bert()
    names = [node.name for node in model.graph.node]
    first, last = names.index(next(n for n in names if n.startswith("Transpose"))), len(names) - 4
    vdevices = [rh.native("llvm"), rh.VDevice({"kind": "llvm", "mcpu": "x86-64-v3"}, 1)]
    inside = dict.fromkeys(names[first : last + 1], "vdevice:1")
    mod = rh.transform.RealizeVDevice()(rh.from_onnx(model, vdevices=vdevices, placement=inside))
    (call,) = attentions(form_attention(mod))
    assert same_vdevice(call.ty.vdevice, vdevices[1])
    check(model, vdevices, placement=inside)
    check(model, vdevices, placement={"Softmax*": "vdevice:1"})


def test_devices_without_a_kernel_keep_the_ops() -> None:
    mod = rh.transform.RealizeVDevice()(rh.from_onnx(bert(), vdevices=["vulkan"]))
    assert form_attention(mod) is mod
