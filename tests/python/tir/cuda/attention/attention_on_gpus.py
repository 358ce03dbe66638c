"""Attention by kernels of GPUs, run by their interpreter and compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm

from gpu_interpreter import run
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.tir.commands.table_kernel import is_one_launch
from tir.attention_runs import Case, problem_of, reference, stored
from tir.cuda.gpu_runs import run_on_gpu

_ORDERS = ("bhmd", "bgnd", "bgne")
_UNITS = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def check(
    case: Case,
    kernel: Callable[[Any], tvm.tirx.PrimFunc],
    rng: np.random.Generator,
    arch: str = "sm_90a",
    on_gpu: bool = False,
    unit: float | None = None,
) -> None:
    """A kernel, one launch, on random operands, with NaN around them and in what it must write.

    By the interpreter of GPU kernels, or on this machine's GPU. `unit` is that of the type which it rounds to, where
    that is not the result's.
    """
    func = kernel(problem_of(case))
    assert is_one_launch(func)
    s, dtype = case.sizes, numpy_dtype(case.dtype)
    shapes = ((s["b"], s["h"], s["m"], s["d"]), (s["b"], s["g"], s["n"], s["d"]), (s["b"], s["g"], s["n"], s["e"]))
    operands = [rng.standard_normal(shape).astype(dtype).astype("float32") for shape in shapes]
    want = reference(case, *operands)
    inputs = [
        stored(text, start, array, order).astype(dtype)
        for text, start, array, order in zip(case.maps, case.starts, operands, _ORDERS, strict=False)
    ]
    inputs += [] if case.mask is None else [case.mask]
    result = stored(case.maps[3], 0, np.full(want.shape, np.nan, "float32"), "bhme").astype(dtype)
    if on_gpu:
        result = run_on_gpu(func, inputs, result.shape, case.dtype)
    else:
        run(func, *inputs, result, arch=arch)
    unit = unit or _UNITS[case.dtype]
    np.testing.assert_allclose(
        result.astype("float64"),
        stored(case.maps[3], 0, want, "bhme"),
        rtol=2 * unit,
        atol=max(4 * unit, 2e-6) * np.abs(operands[2]).max(),
        equal_nan=True,
    )
