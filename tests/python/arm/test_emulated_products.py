"""Products for AArch64, compiled here and called on CPUs that qemu emulates: each instruction, and ragged sizes.

Programs for AArch64 take about ten times as long under emulation as here, and compilers are most of what tests run. So
`make test` compiles here, and 200 calls take seconds; `make test-arm` runs the tests of all kernels in the same way.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm

from arm.emulated_cpu import EmulatedCpu, link
from arm.environment import unsupported_reason
from relax_hetero.encoding.problem import Window
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.conv.convolution import conv_kernel
from relax_hetero.tir.matmul.matmul import matmul_kernel
from seeds import fresh_rng
from tir.convolutions_of import conv_problem, random_operands, reference
from tir.products_of import assert_close, numpy_type, plain_problem, random_array

pytestmark = [pytest.mark.sampled(1), pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())]

TYPES = [*((dtype, dtype, "float32") for dtype in ("float32", "float16", "bfloat16")), ("int8", "int8", "int32")]
OTHER_SIGNS = [(lhs, rhs, "int32") for lhs, rhs in (("uint8", "int8"), ("uint8", "uint8"), ("int8", "uint8"))]
SIZES = [
    *[(1, 40, 24), (2, 9, 8), (3, 33, 17), (4, 16, 8), (5, 1, 1), (7, 37, 9), (8, 64, 23)],
    *[(9, 8, 40), (11, 129, 7), (12, 256, 16), (13, 31, 33), (24, 100, 12), (31, 2500, 5), (4, 0, 4)],
]


@pytest.mark.slow
@pytest.mark.parametrize("mcpu", ["a64fx", "neoverse-n1"])
def test_few_static_rows_and_convolutions(mcpu: str, tmp_path: Path) -> None:
    """Rows that are read in place, by panels as wide as vectors of SVE, and narrow panels; images of bytes."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu, "num-cores": 2})
    cpu, rng = cpu_target_of(target), fresh_rng()
    kernels, calls = {}, []
    for number, types in enumerate([*TYPES, *OTHER_SIGNS]):
        for m, k, n in ((1, 37, 70), (3, 64, 33), (13, 21, 7)):
            name, problem = f"product{number}_{m}", plain_problem(target, (m, k, n), types)
            a, b = random_array(rng, (m, k), types[0]), random_array(rng, (k, n), types[1])
            kernels[name] = matmul_kernel(problem, cpu).with_attr("global_symbol", name)
            calls.append((name, a, problem.rhs.layout.pack(b), a.astype("float64") @ b.astype("float64"), k))
        problem = conv_problem(cpu, (20, 33), (5, 13), (Window(3, before=1, after=1),) * 2, dtype=types)
        data, weight = random_operands(problem, rng)
        name, want = f"image{number}", reference(problem, data, weight)
        kernels[name] = conv_kernel(problem, cpu).with_attr("global_symbol", name)
        packed = [operand.layout.pack(each) for operand, each in zip(problem.parameters, (data, weight), strict=False)]
        calls.append((name, *packed, problem.result.layout.pack(want), 180))
    library = tmp_path / "kernels.so"
    link(tvm.compile(tvm.IRModule(kernels), target=target), library)
    emulated = EmulatedCpu(mcpu)
    try:
        for name, a, b, want, k in calls:
            acc = "int32" if "int" in str(a.dtype) else "float32"
            got = np.frombuffer(b"\xff" * (4 * want.size), acc).reshape(want.shape).copy()
            emulated.call(library, name, (a, b, got))
            assert_close(got, want, acc, k)
    finally:
        emulated.close()


@pytest.mark.parametrize(
    ("mcpu", "emulated", "types"),
    [
        ("neoverse-v2", "max", TYPES),
        pytest.param("neoverse-v2", "max", OTHER_SIGNS, marks=pytest.mark.slow),
        pytest.param("neoverse-n1", "neoverse-n1", TYPES + OTHER_SIGNS, marks=pytest.mark.slow),
        pytest.param("cortex-a72", "cortex-a72", TYPES + OTHER_SIGNS, marks=pytest.mark.slow),
        ("a64fx", "a64fx", TYPES[:1] + OTHER_SIGNS[:1]),  # SVE of 512 bits
        pytest.param("a64fx", "a64fx", TYPES[1:] + OTHER_SIGNS[1:], marks=pytest.mark.slow),
        pytest.param("neoverse-v1", "max,sve-default-vector-length=32", TYPES + OTHER_SIGNS, marks=pytest.mark.slow),
        pytest.param("fujitsu-monaka", "max,sve-default-vector-length=32", TYPES + OTHER_SIGNS, marks=pytest.mark.slow),
    ],
    ids=["v2", "v2-signs", "n1", "a72", "a64fx", "a64fx-others", "v1", "monaka"],
)
def test_numbers(mcpu: str, emulated: str, types: list[tuple[str, str, str]], tmp_path: Path) -> None:
    """CPUs that qemu does not name are "max"; others refuse instructions that they lack."""
    absent = ["-mops"] if mcpu == "fujitsu-monaka" else []  # instructions that copy memory, which qemu 7.2 lacks
    config = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu, "mattr": absent, "num-cores": 2}
    target = tvm.target.Target(config)
    problems = {"_".join(each): plain_problem(target, (1, 1, 1), each, symbolic="mkn") for each in types}
    kernels = {
        name: matmul_kernel(problem, cpu_target_of(target)).with_attr("global_symbol", name)
        for name, problem in problems.items()
    }
    library, rng = tmp_path / "kernels.so", fresh_rng()
    link(tvm.compile(tvm.IRModule(kernels), target=target), library)
    cpu = EmulatedCpu(emulated)
    try:
        for (lhs, rhs, acc), (name, problem) in zip(types, problems.items(), strict=True):
            for m, k, n in [*SIZES, *rng.integers(1, [30, 90, 40], (36, 3)).tolist()]:
                a, b = random_array(rng, (m, k), lhs), random_array(rng, (k, n), rhs)
                got = np.frombuffer(b"\xff" * (4 * m * n), numpy_type(acc)).reshape(m, n).copy()
                cpu.call(library, name, (a, problem.rhs.layout.pack(b), got))
                assert_close(got, a.astype("float64") @ b.astype("float64"), acc, k)
    finally:
        cpu.close()
