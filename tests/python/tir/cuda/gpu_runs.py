"""Kernels compiled for and run on this machine's GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tvm
from tvm import tirx

import relax_hetero as rh
from relax_hetero.driver.link.cuda.kernel_sources import generate
from relax_hetero.driver.link.cuda.machine_code import compile_kernels, import_kernels
from relax_hetero.target.element_types import numpy_dtype

needs_gpu = pytest.mark.skipif(not (tvm.runtime.enabled("cuda") and tvm.cuda(0).exist), reason="no NVIDIA GPU")


def run_on_gpu(kernel: tirx.PrimFunc, arrays: Sequence[np.ndarray], shape: Sequence[int], dtype: str) -> np.ndarray:
    """Run a kernel, compiled as `rh.compile` does, into a result that was full of NaN."""
    device, target = tvm.cuda(0), rh.native("cuda").with_host("llvm")
    kernel = kernel.with_attr({"global_symbol": "main", "target": target})
    part = generate(tvm.IRModule({"main": kernel}), target)
    import_kernels(part, compile_kernels(part.sources))
    size = int(np.prod(shape)) * numpy_dtype(dtype).itemsize
    out = tvm.runtime.tensor(np.full(size, 0xFF, np.uint8).view(numpy_dtype(dtype)).reshape(shape), device)
    part.host["main"](*(tvm.runtime.tensor(array, device) for array in arrays), out)
    return out.numpy()
