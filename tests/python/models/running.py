"""Running a whole model here and in ONNX Runtime, and what a test asserts about it."""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm

import relax_hetero as rh

# A CPU may stand for the GPU where tests of GPUs are written: RELAX_HETERO_TEST_GPU='{"kind": "llvm"}'.
STAND_IN = os.environ.get("RELAX_HETERO_TEST_GPU", "")
GPU = json.loads(STAND_IN) if STAND_IN else "cuda"
needs_gpu = pytest.mark.skipif(not (STAND_IN or tvm.cuda(0).exist), reason="no NVIDIA GPU")


def expected_outputs(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of ONNX Runtime."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def outputs_of(executable: rh.vm.Executable, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of a machine made from `executable`."""
    result = rh.vm.VirtualMachine(executable)["main"](**inputs)
    return [tensor.numpy() for tensor in (result if isinstance(result, tuple) else (result,))]


def outputs_after_export(executable: rh.vm.Executable, inputs: dict[str, np.ndarray], folder: Path) -> list[np.ndarray]:
    """The same from the library that the executable is exported to."""
    path = folder / "model.so"
    executable.export_library(str(path))
    return outputs_of(rh.load(str(path)), inputs)


def assert_same(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Equal within a relative 1e-3; values small against the tensor's largest are compared with that instead."""
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * float(np.abs(theirs).max()))


def cut(names: Sequence[str], switches: Sequence[int]) -> dict[str, str]:
    """A placement that starts on the first device and changes to the other one before each node in `switches`."""
    placement = {}
    for index, name in enumerate(names):
        crossed = sum(switch <= index for switch in switches)
        placement[glob.escape(name)] = f"vdevice:{crossed % 2}"
    return placement


def ops_per_device(executable: rh.vm.Executable) -> dict[int, int]:
    """How many ops each device of the manifest holds."""
    return Counter(entry["device_index"] for entry in executable.metadata.placement if entry["kind"] == "op")


def assert_both_devices_hold_ops(executable: rh.vm.Executable) -> None:
    """Nothing is tested about two devices where one of them is idle."""
    counts = ops_per_device(executable)
    assert counts[0] > 0 and counts[1] > 0, f"ops per device: {counts}"
