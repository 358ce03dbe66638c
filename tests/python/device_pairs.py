"""The pair of devices of tests of two devices that take any: `TWO_DEVICES`.

By default two CPUs, whose kernels are different machine code. ``RELAX_HETERO_TEST_SECOND=npu`` makes the second one the
simulated accelerator of examples/backend_npu, which has memory of its own (``make test-npu`` runs these tests with it);
other values are kinds ("opencl", "cuda") or targets as JSON. Rules name the devices "vdevice:0" and "vdevice:1".
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

from relax_hetero.target.backend import register_backend

NPU_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "backend_npu"
BASELINE = {"kind": "llvm", "mcpu": "x86-64-v2" if platform.machine() == "x86_64" else "generic"}
"""The baseline of this CPU's architecture."""


def _second(text: str) -> object:
    if text == "npu":
        sys.path.insert(0, str(NPU_FOLDER))
        import backend_npu

        register_backend(backend_npu.NpuBackend())
        return "ext_dev"
    return json.loads(text) if text.startswith("{") else text or BASELINE


TWO_DEVICES = ["llvm", _second(os.environ.get("RELAX_HETERO_TEST_SECOND", ""))]
