"""Process in which ``relax-hetero doctor`` imports TVM and tests each device, so that a crash does not end the doctor.

It prints results at once as lines of JSON objects, so that those before a crash are not lost.
"""

from __future__ import annotations

import json
import time
from typing import Any

_ROWS, _DEPTH, _COLUMNS = 4, 64, 16
_TOLERANCE = 1e-2
"""Maximum error of sums of 64 float32 products; some GPUs multiply with about half of the mantissa (TF32)."""


def main() -> None:
    """Print lines about the start, the C compiler, GPUs, the devices, and a test of each device."""
    _print_line("start", None)
    import tvm

    if tvm.base._RUNTIME_ONLY:
        about = "is loaded; this installation runs exported files, and compiles nothing"
        _print_line("tested", {"name": "TVM's run time", "ok": True, "about": about})
        _print_line("end", None)
        return
    from ..devices import local_devices

    _print_line("compiler", _check_compiler())
    devices = local_devices()
    _print_line("gpus", _check_gpus())
    _print_line("devices", devices)
    for device in devices:
        _print_line("trying", device["name"])
        _print_line("tested", _test(device["name"]))
    _print_line("end", None)


def _test(name: str) -> dict[str, Any]:
    """Compile and run a small model on a device, and compare it with numpy."""
    start = time.perf_counter()
    try:
        error = _largest_error(name)
    except Exception as failure:  # any failure is a result of the test
        return {"name": name, "ok": False, "about": f"{type(failure).__name__}: {failure}".splitlines()[0]}
    about = f"a product, its bias and a softmax in {time.perf_counter() - start:.1f} s; largest error {error:.1e}"
    return {"name": name, "ok": error < _TOLERANCE, "about": about}


def _largest_error(name: str) -> float:
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
    inputs_and_outputs = [
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, [_ROWS, columns])]
        for value, columns in (("x", _DEPTH), ("y", _COLUMNS))
    ]
    graph = helper.make_graph(
        nodes, "self_test", *inputs_and_outputs, [numpy_helper.from_array(a, n) for a, n in ((w, "w"), (b, "b"))]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    device = "llvm" if name.startswith("llvm") else name
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, vdevices=[device]), cache=False))
    x = generator.standard_normal((_ROWS, _DEPTH)).astype("float32")
    output = machine["main"](x).numpy()
    logits = x.astype("float64") @ w + b
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return float(np.abs(output - exponentials / exponentials.sum(axis=-1, keepdims=True)).max())


def _check_compiler() -> dict[str, Any]:
    from ...errors import HeteroError
    from ...vm.file.export import check_linking

    try:
        return {"ok": True, "about": " ".join(check_linking("exporting a library"))}
    except HeteroError as error:
        return {"ok": False, "about": str(error)}


def _check_gpus() -> dict[str, str]:
    from ...backends.cuda import CudaBackend
    from ...driver.link.cuda.compilers import find_compiler
    from ...errors import HeteroError

    try:
        compiler = type(find_compiler()).__name__.removesuffix("Compiler")
        missing = ""
    except HeteroError as error:
        compiler, missing = "", str(error)
    return {"runtime": CudaBackend().why_not_loaded(), "compiler": compiler, "no_compiler": missing}


def _print_line(kind: str, value: Any) -> None:
    print(json.dumps({kind: value}), flush=True)


if __name__ == "__main__":
    main()
