"""Models cut over two devices at random places give what ONNX Runtime gives."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from models.running import (
    assert_both_devices_hold_ops,
    assert_same,
    cut,
    expected_outputs,
    outputs_after_export,
    outputs_of,
)
from models.zoo import inputs_of, minilm, node_names, random_model
from seeds import fresh_rng

Case = tuple[onnx.ModelProto, dict[str, np.ndarray], list[np.ndarray]]
MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "minilm": lambda: minilm(1, 16),
    **{name: partial(random_model, name) for name in ("squeezenet", "bvlc_alexnet", "inception_v1", "resnet50")},
}
# How many cuts: the larger models take some ten seconds each. Every run tries a few,
# `make test-slow` all of them.
FEW_CUTS = {"squeezenet": 2}
CUTS = {"minilm": 10, "squeezenet": 6, "bvlc_alexnet": 3, "inception_v1": 3, "resnet50": 3}
# A cut is a handful of points of the whole; as fractions they fit every model.
FRACTIONS = st.lists(st.integers(1, 199), min_size=1, max_size=6, unique=True)


@functools.cache
def case(name: str) -> Case:
    model = MODELS[name]()
    inputs = inputs_of(model)
    return model, inputs, expected_outputs(model, inputs)


def switches(names: Sequence[str], fractions: Sequence[int]) -> list[int]:
    return sorted({min(len(names) - 1, max(1, len(names) * fraction // 200)) for fraction in fractions})


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW_CUTS)
def test_a_few_random_cuts(name: str):
    settings(max_examples=FEW_CUTS[name])(given(fractions=FRACTIONS)(check_cut))(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_random_cuts(name: str):
    examples = int(os.environ.get("RELAX_HETERO_CUTS", CUTS[name]))
    settings(max_examples=examples)(given(fractions=FRACTIONS)(check_cut))(name)


def check_cut(name: str, fractions: list[int]) -> None:
    model, inputs, expected = case(name)
    names = node_names(model)
    placement = cut(names, switches(names, fractions))
    executable = rh.compile(rh.from_onnx(model, vdevices=TWO_DEVICES, placement=placement))
    assert_both_devices_hold_ops(executable)
    assert_same(outputs_of(executable, inputs), expected)


@pytest.mark.slow  # test_light_models.py cuts a network over two devices in every run, and test_random_graphs.py graphs
def test_every_node_anywhere():
    check_choices(list(fresh_rng().integers(0, 2, 221)))


@pytest.mark.slow
@given(choices=st.lists(st.booleans(), min_size=221, max_size=221))
@settings(max_examples=3)
def test_every_node_anywhere_thrice(choices: list[bool]):
    check_choices(choices)


def check_choices(choices: Sequence[int]) -> None:
    model, inputs, expected = case("minilm")
    names = node_names(model)
    placement = {name: f"vdevice:{int(choice)}" for name, choice in zip(names, choices, strict=True)}
    placement |= {names[0]: "vdevice:0", names[-1]: "vdevice:1"}
    executable = rh.compile(rh.from_onnx(model, vdevices=TWO_DEVICES, placement=placement))
    assert_both_devices_hold_ops(executable)
    assert_same(outputs_of(executable, inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("vdevices", [["llvm"], TWO_DEVICES])
def test_minilm_after_export_and_load(vdevices: list[object], tmp_path: Path):
    model, inputs, expected = case("minilm")
    placement = {"/encoder/layer.[345]/*": "vdevice:1"} if len(vdevices) > 1 else None
    executable = rh.compile(rh.from_onnx(model, vdevices=vdevices, placement=placement))
    assert_same(outputs_after_export(executable, inputs, tmp_path), expected)
