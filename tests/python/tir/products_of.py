"""Matrix products as problems, run by their kernels and compared with float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import tvm

from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import Epilogue, MatmulProblem, Operand
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.target.dot_instructions import dot_instruction_for
from relax_hetero.target.tiles import matmul_columns
from relax_hetero.tir.matmul.matmul import matmul_kernel
from tir.kernel_runs import HOST_ARCH, target_of

# On AArch64, levels of its own stand in for those of x86.
AVX512, AVX2, SSE = (
    (target_of("vnni"), target_of("avx2"), target_of("sse"))
    if HOST_ARCH == "x86_64"
    else (target_of("i8mm"), target_of("dotprod"), target_of("neon"))
)
C = tvm.target.Target("c")

SYMBOLS = {"b0": "s0", "b1": "s1", "m": "s2", "n": "s3", "k": "s4"}


def numpy_type(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    if "int" in dtype:
        limits = np.iinfo(dtype) if "8" in dtype else np.iinfo("int8")
        return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
    return rng.standard_normal(shape).astype(numpy_type(dtype))


def operand(
    shape: Sequence[int],
    dtype: str,
    index_map: Sequence[str],
    layout: PackedLayout | None = None,
    symbols: Mapping[str, str] | None = None,
) -> Operand:
    dims = tuple((symbols or {}).get(name, size) for size, name in zip(shape, index_map, strict=True))
    return Operand(dims, dtype, tuple(index_map), layout or PackedLayout.identity(len(shape)))


def weight_layout(target: tvm.target.Target, types: tuple[str, str, str]) -> PackedLayout:
    """How a (k, n) right operand is packed for a target."""
    cpu = cpu_target_of(target)
    dot = dot_instruction_for(cpu, *types)
    columns = matmul_columns(cpu, dot)
    if dot.k0 == 1:
        return PackedLayout((1, 0), (1,), (columns,))
    return PackedLayout((1, 0), (1, 0), (columns, dot.k0), dot.compensation != 0)


def plain_problem(
    target: tvm.target.Target,
    sizes: tuple[int, int, int],
    types: tuple[str, str, str] = ("float32",) * 3,
    symbolic: str = "",
    result: str | None = None,
    epilogue: Epilogue | None = None,
) -> MatmulProblem:
    """Row-major left operand and result, packed right operand."""
    m, k, n = sizes
    symbols = {name: SYMBOLS[name] for name in symbolic}
    return MatmulProblem(
        operand((m, k), types[0], "mk", symbols=symbols),
        operand((k, n), types[1], "kn", weight_layout(target, types), symbols),
        operand((m, n), result or types[2], "mn", symbols=symbols),
        types[2],
        epilogue=epilogue,
    )


def compile_kernel(problem: MatmulProblem, target: tvm.target.Target) -> tvm.runtime.Executable:
    return tvm.compile(tvm.IRModule({"matmul": matmul_kernel(problem, cpu_target_of(target))}), target=target)


def run_kernel(
    problem: MatmulProblem, target: tvm.target.Target, arrays: Sequence[np.ndarray], shape: Sequence[int]
) -> np.ndarray:
    """The result of a problem's kernel for logical operands; storage of the result is poisoned before."""
    executable = compile_kernel(problem, target)
    operands = problem.parameters[:-1]
    stored = [op.layout.pack(array) if array.ndim else array for op, array in zip(operands, arrays, strict=True)]
    return run_stored(executable, problem, target, stored, shape)


def run_stored(
    executable: tvm.runtime.Executable,
    problem: MatmulProblem,
    target: tvm.target.Target,
    stored: Sequence[np.ndarray],
    shape: Sequence[int],
) -> np.ndarray:
    """Run a kernel like `run_kernel`, on operands in their stored layouts."""
    with TemporaryDirectory() as folder:
        module = executable
        if target.kind.name == "c":
            library = Path(folder, "kernel.so")
            executable.export_library(str(library))
            module = tvm.runtime.load_module(str(library))
        result = problem.result
        poison = np.frombuffer(b"\xab" * 8, numpy_type(result.dtype))[0] if "int" in result.dtype else np.nan
        out = tvm.runtime.tensor(np.full(result.layout.packed_shape(shape), poison, numpy_type(result.dtype)))
        module["matmul"](*(tvm.runtime.tensor(array) for array in stored), out)
        return result.layout.unpack(out.numpy(), shape)


def check(
    problem: MatmulProblem,
    target: tvm.target.Target,
    arrays: Sequence[np.ndarray],
    want: np.ndarray,
    k: int,
    scale: float = 1.0,
) -> None:
    """Compare a kernel with a float64 reference: integers exactly, floats within 1e-5 times the root of k, and one
    rounding of the result's type."""
    got = run_kernel(problem, target, arrays, want.shape)
    assert_close(got, want, problem.acc_dtype, k, scale)


def assert_close(got: np.ndarray, want: np.ndarray, acc_dtype: str, k: int, scale: float = 1.0) -> None:
    if "int" in acc_dtype:
        np.testing.assert_array_equal(got, want)
        return
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(str(got.dtype), 2.0**-24)
    wide = got.astype("float64")
    np.testing.assert_allclose(wide, want, rtol=rounding, atol=scale * 1e-5 * np.sqrt(max(k, 1)), equal_nan=True)
