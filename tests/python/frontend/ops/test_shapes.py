"""Ops that make shapes and sequences of numbers."""

import numpy as np
import pytest

import relax_hetero as rh
from frontend.ops.checking import node_model


def test_a_range_reaches_from_the_least_to_the_largest_integer():
    model, _ = node_model("Range", [np.array(number, "int64") for number in (0, 1, 1)], 18)
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    least, largest = -(2**63), 2**63 - 1
    for ends in [(0, 10, 3), (10, 0, -3), (-5, 5, 4), (5, -5, -4), (0, 5, -1), (5, 0, least), (0, 5, largest)] + [
        (least, largest, 2**62),
        (largest, least, -(2**62)),
        (least, largest, largest),
    ]:
        actual = machine["main"](*(np.array(number, "int64") for number in ends)).numpy()
        assert actual.tolist() == list(range(*ends)), ends
    for ends in [(0, 5, 0), (0, 2**62, 1), (least, largest, 1)]:
        with pytest.raises(rh.HeteroError):
            machine["main"](*(np.array(number, "int64") for number in ends))
