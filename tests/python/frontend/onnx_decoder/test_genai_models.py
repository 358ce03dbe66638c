"""Models in the style of onnxruntime-genai's builder, against ONNX Runtime: a prompt and steps, with their caches."""

from __future__ import annotations

import dataclasses

import pytest

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from frontend.onnx_decoder.decoder_graphs import GenAI, Shape
from frontend.onnx_decoder.steps import check_steps

LAYERS = {"/model/layers.0/*": "vdevice:0", "/model/layers.1/*": "vdevice:1", "*": "vdevice:0"}
GROWING = {"total_sequence_length": "past_sequence_length + sequence_length"}


@pytest.mark.slow
def test_steps_of_a_shared_cache_that_is_donated():
    model = GenAI().model()
    mod = rh.from_onnx(model, vdevices=["llvm"], shapes={"past_sequence_length": 16})
    donated = [name for name in mod["main"].attrs["input_names"] if str(name).startswith("past")]
    exe = rh.compile(mod, donate=donated)
    check_steps(model, rh.vm.VirtualMachine(exe)["main"], length=16)


@pytest.mark.slow
def test_steps_on_two_devices_of_caches_that_grow():
    model = GenAI(bits=8, is_packed=False, has_bias=True, block=32, shape=Shape(hidden=64)).model()
    mod = rh.from_onnx(model, vdevices=TWO_DEVICES, placement=LAYERS)
    check_steps(model, rh.vm.VirtualMachine(rh.compile(mod))["main"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"norms_heads": True, "is_packed": False, "rotates_inside": False},  # Qwen 3
        {"has_bias": True, "bits": 0},  # Qwen 2
        {"window": 3, "softcap": 5.0, "bits": 2},  # Gemma 2, Mistral
        {"shape": dataclasses.replace(Shape(), kv_heads=1, size=32)},  # Gemma
        {"shape": dataclasses.replace(Shape(), layers=1), "is_tied": True, "experts": 4},  # gpt-oss
    ],
)
def test_steps_of_other_models(options):
    model = GenAI(**options).model()
    mod = rh.from_onnx(model, shapes=GROWING)
    # Kernels of a few bits round activations to 16 bits, ONNX Runtime's to none.
    check_steps(model, rh.vm.VirtualMachine(rh.compile(mod))["main"], rtol=1e-2 if options.get("bits", 4) else 1e-3)


@pytest.mark.slow
def test_steps_in_half_precision():
    model = GenAI(floats="float16", has_bias=True).model()
    mod = rh.from_onnx(model, shapes=GROWING)
    check_steps(model, rh.vm.VirtualMachine(rh.compile(mod))["main"], rtol=0.1)
