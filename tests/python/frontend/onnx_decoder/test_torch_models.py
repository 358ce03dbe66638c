"""Models in the style of PyTorch's exporter and Optimum, against ONNX Runtime: a prompt and steps, with caches."""

from __future__ import annotations

from dataclasses import replace

import pytest

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from frontend.onnx_decoder.decoder_graphs import Shape
from frontend.onnx_decoder.steps import check_steps
from frontend.onnx_decoder.torch_graphs import Torch

ONE_HEAD = replace(Shape(), kv_heads=4)

MODELS = {
    "llama": Torch(),
    "qwen2": Torch(has_bias=True),
    "gemma": Torch(shape=replace(Shape(), kv_heads=1), scales_embedding=True, activation="gelu"),
    "phi": Torch(shape=ONE_HEAD, rotated=8, norm="layer", activation="gelu", is_gated=False, has_bias=True,
                 is_parallel=True),
    "gpt_neox": Torch(shape=ONE_HEAD, rotated=4, norm="layer", activation="gelu", is_gated=False, is_parallel=True,
                      joins_heads=True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_steps(name):
    model = MODELS[name].model()
    check_steps(model, rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"])


@pytest.mark.slow
def test_steps_on_two_devices():
    model = MODELS["llama"].model()
    rules = {"/model/layers.0/*": "vdevice:0", "/model/layers.1/*": "vdevice:1", "*": "vdevice:0"}
    mod = rh.from_onnx(model, vdevices=TWO_DEVICES, placement=rules)
    check_steps(model, rh.vm.VirtualMachine(rh.compile(mod))["main"])
