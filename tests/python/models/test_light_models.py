"""Image models of the onnx package: the same outputs as ONNX Runtime, on one device, cut over two, and exported."""

from __future__ import annotations

from pathlib import Path

import pytest

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from marks import slow_but_for
from models.running import (
    assert_both_devices_hold_ops,
    assert_same,
    cut,
    expected_outputs,
    outputs_after_export,
    outputs_of,
)
from models.zoo import inputs_of, light_model, node_names, random_model

MODELS = ("squeezenet", "resnet50", "inception_v1", "bvlc_alexnet")


@pytest.mark.slow  # the next two tests are of one of them
@pytest.mark.parametrize("name", MODELS)
def test_one_device(name: str, tmp_path: Path):
    model = random_model(name)
    inputs = inputs_of(model)
    expected = expected_outputs(model, inputs)
    executable = rh.compile(rh.from_onnx(model))
    outputs = outputs_of(executable, inputs)
    assert_same(outputs, expected)
    for ours, loaded in zip(outputs, outputs_after_export(executable, inputs, tmp_path), strict=True):
        assert (ours == loaded).all()


@pytest.mark.parametrize("name", slow_but_for(MODELS, ["squeezenet"]))
def test_cut_over_two_devices(name: str, tmp_path: Path):
    model = random_model(name, seed=1)
    inputs = inputs_of(model, seed=1)
    names = node_names(model)
    placement = cut(names, [len(names) // 3, len(names) // 2, len(names) * 4 // 5])
    executable = rh.compile(rh.from_onnx(model, vdevices=TWO_DEVICES, placement=placement))
    assert_both_devices_hold_ops(executable)
    assert_same(outputs_after_export(executable, inputs, tmp_path), expected_outputs(model, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_as_published(name: str):
    """With the constant weights the package ships, whose shapes are computed in the graph."""
    model = light_model(name)
    inputs = inputs_of(model)
    assert_same(outputs_of(rh.compile(rh.from_onnx(model)), inputs), expected_outputs(model, inputs))
