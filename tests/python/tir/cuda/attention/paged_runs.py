"""Kernels over pages on this machine's GPU."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import tirx

import relax_hetero as rh
from relax_hetero.driver.link.cuda.kernel_sources import generate
from relax_hetero.driver.link.cuda.machine_code import compile_kernels, import_kernels
from relax_hetero.target.element_types import numpy_dtype


def on_gpu(kernel: tirx.PrimFunc, call, *before: tirx.PrimFunc) -> tuple[np.ndarray, np.ndarray]:
    """The result of a kernel, full of NaN before, and the pages; kernels `before` write only the pages."""
    device = tvm.cuda(0)
    work = call.work
    out = tvm.runtime.tensor(
        np.full((work.rows, work.heads * work.value_size), np.nan, numpy_dtype(work.dtype)), device
    )
    arguments = [tvm.runtime.tensor(array, device) for array in call.arguments()]
    for one in before:
        _compiled(one)(*arguments)
    _compiled(kernel)(*arguments, out)
    return out.numpy(), arguments[1].numpy()


def _compiled(kernel: tirx.PrimFunc):
    target = rh.native("cuda").with_host("llvm")
    kernel = kernel.with_attr({"global_symbol": "main", "target": target})
    part = generate(tvm.IRModule({"main": kernel}), target)
    import_kernels(part, compile_kernels(part.sources))
    return part.host["main"]
