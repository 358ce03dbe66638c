"""The process in which ``relax-hetero doctor`` imports TVM and tries each device: a crash ends it, and not the doctor.

It prints one JSON object a line, each when it is known, so that what was found before a crash is not lost.
"""

from __future__ import annotations

import json
import time
from typing import Any

_ROWS, _DEPTH, _COLUMNS = 4, 64, 16
# Sums of 64 products of float32; half of the mantissa is what some GPUs take for them.
_TOLERANCE = 1e-2


def main() -> None:
    """Print the lines: the start, the C compiler, GPUs that TVM cannot use, the devices, and a test of each."""
    _tell("start", None)
    import tvm  # noqa: F401 (the first of what may fail)

    from ..devices import local_devices

    _tell("compiler", _compiler())
    devices = local_devices()
    _tell("gpus", _why_no_gpu())
    _tell("devices", devices)
    for device in devices:
        _tell("trying", device["name"])
        _tell("tested", _tested(device["name"]))
    _tell("end", None)


def _tested(name: str) -> dict[str, Any]:
    """Compile and run a small model on a device, and compare it with numpy."""
    start = time.perf_counter()
    try:
        error = _difference(name)
    except Exception as failure:  # whatever goes wrong is what the doctor is for
        return {"name": name, "ok": False, "about": f"{type(failure).__name__}: {failure}".splitlines()[0]}
    about = f"a product, its bias and a softmax in {time.perf_counter() - start:.1f} s; largest error {error:.1e}"
    return {"name": name, "ok": error < _TOLERANCE, "about": about}


def _difference(name: str) -> float:
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    import relax_hetero as rh

    generator = np.random.default_rng(0)
    w, b = (generator.standard_normal(shape).astype("float32") for shape in ((_DEPTH, _COLUMNS), (_COLUMNS,)))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["s"]),
        helper.make_node("Softmax", ["s"], ["y"], axis=-1),
    ]
    sides = [
        [helper.make_tensor_value_info(side, TensorProto.FLOAT, [_ROWS, columns])]
        for side, columns in (("x", _DEPTH), ("y", _COLUMNS))
    ]
    graph = helper.make_graph(
        nodes, "self_test", *sides, [numpy_helper.from_array(a, n) for a, n in ((w, "w"), (b, "b"))]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    device = "llvm" if name.startswith("llvm") else name
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, vdevices=[device]), cache=False))
    x = generator.standard_normal((_ROWS, _DEPTH)).astype("float32")
    found = machine["main"](x).numpy()
    sums = x.astype("float64") @ w + b
    powers = np.exp(sums - sums.max(axis=-1, keepdims=True))
    return float(np.abs(found - powers / powers.sum(axis=-1, keepdims=True)).max())


def _compiler() -> dict[str, Any]:
    from ...errors import HeteroError
    from ...vm.file.export import check_linking

    try:
        return {"ok": True, "about": " ".join(check_linking("exporting a library"))}
    except HeteroError as error:
        return {"ok": False, "about": str(error)}


def _why_no_gpu() -> dict[str, str]:
    from ...backends.cuda import CudaBackend
    from ...driver.link.cuda.compilers import find_compiler
    from ...errors import HeteroError

    try:
        compiler = type(find_compiler()).__name__.removesuffix("Compiler")
        missing = ""
    except HeteroError as error:
        compiler, missing = "", str(error)
    return {"runtime": CudaBackend().why_not_loaded(), "compiler": compiler, "no_compiler": missing}


def _tell(kind: str, what: Any) -> None:
    print(json.dumps({kind: what}), flush=True)


if __name__ == "__main__":
    main()
