"""The library's own resolvers: which layout for which operand, on which machine."""

from __future__ import annotations

import pytest
import tvm
from tvm import tirx

from relax_hetero.encoding import Encoding, resolver_for
from relax_hetero.encoding.problem import MatmulProblem, Operand
from relax_hetero.errors import EncodingError
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.target.dot_instructions import DOT_INSTRUCTIONS, dot_instruction_for

AVX512 = {
    "kind": "llvm",
    "mtriple": "x86_64-linux-gnu",
    "mcpu": "x86-64-v4",
    "mattr": ["+avx512vnni", "+avx512bf16"],
}
FP16 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4", "mattr": ["+avx512fp16"]}
AVX512_BASE = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4"}
AVX2 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3"}
SSE = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
NEON = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]}
DOTPROD = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon", "+dotprod"]}
UNKNOWN = {"kind": "llvm", "mtriple": "riscv64-linux-gnu"}
C = {"kind": "c"}
CUDA = {"kind": "cuda", "arch": "sm_90"}

F32 = "float32 * float32 -> float32"
MATMUL = "(m, k) * (k, n) -> (m, n); m=?, n=100, k=7"
LINEAR = "(m, k) * (n, k) -> (m, n); m=128, n=100, k=7"


def _layouts(target, types, rest):
    target = tvm.target.Target(target)
    op = "batch_matmul" if "b0" in rest else "matmul"
    encoding = Encoding.parse(f"{op}[0]<{types}; {rest}>")
    layouts = [resolver_for(target).resolve(encoding.of(index), target) for index in range(3)]
    return [None if layout is None else str(layout) for layout in layouts]


@pytest.mark.parametrize(
    "target, types, rest, rhs",
    [
        (AVX512, F32, MATMUL, "pack<outer=[1, 0] inner=[1:32]>"),
        (AVX512, F32, LINEAR, "pack<outer=[0, 1] inner=[0:32]>"),
        (AVX512, "float64 * float64 -> float64", MATMUL, "pack<outer=[1, 0] inner=[1:16]>"),
        (AVX512, "uint8 * int8 -> int32", MATMUL, "pack<outer=[1, 0] inner=[1:32, 0:4]>"),
        (AVX512, "int8 * int8 -> int32", MATMUL, "pack<outer=[1, 0] inner=[1:32, 0:4] +compensation>"),
        (AVX512, "int8 * int8 -> int32", LINEAR, "pack<outer=[0, 1] inner=[0:32, 1:4] +compensation>"),
        (AVX512_BASE, "int8 * int8 -> int32", MATMUL, "pack<outer=[1, 0] inner=[1:32, 0:4]>"),
        (AVX512, "bfloat16 * bfloat16 -> float32", MATMUL, "pack<outer=[1, 0] inner=[1:32, 0:2]>"),
        (AVX512, "float16 * float16 -> float32", MATMUL, "pack<outer=[1, 0] inner=[1:32]>"),
        (AVX2, F32, MATMUL, "pack<outer=[1, 0] inner=[1:16]>"),
        (AVX2, "int8 * int8 -> int32", MATMUL, "pack<outer=[1, 0] inner=[1:16, 0:4]>"),
        (SSE, F32, MATMUL, "pack<outer=[1, 0] inner=[1:8]>"),
        (NEON, F32, MATMUL, "pack<outer=[1, 0] inner=[1:8]>"),
        (DOTPROD, "uint8 * int8 -> int32", MATMUL, "pack<outer=[1, 0] inner=[1:8, 0:4] +compensation>"),
    ],
)
def test_vector_machines_pack_the_right_operand(target, types, rest, rhs):
    assert _layouts(target, types, rest) == ["identity<2>", rhs, "identity<2>"]


@pytest.mark.parametrize("target", [C, UNKNOWN])
def test_unknown_machines_pack_all_three(target):
    assert _layouts(target, F32, MATMUL) == [
        "pack<outer=[0, 1] inner=[0:8]>",
        "pack<outer=[1, 0] inner=[1:8]>",
        "pack<outer=[0, 1] inner=[0:8, 1:8]>",
    ]


@pytest.mark.parametrize(
    ("arch", "types", "rest", "rhs"),
    [
        ("sm_90a", "float16 * float16 -> float32", MATMUL, "pack<outer=[1, 0] inner=[1:64, 0:64] +swizzle>"),
        ("sm_80", "bfloat16 * bfloat16 -> float32", LINEAR, "pack<outer=[0, 1] inner=[0:64, 1:64] +swizzle>"),
        ("sm_90", "int8 * int8 -> int32", MATMUL, "pack<outer=[1, 0] inner=[1:64, 0:128] +swizzle>"),
        ("sm_80", "float8_e4m3fn * float8_e4m3fn -> float32", MATMUL, "identity<2>"),
        ("sm_61", "float16 * float16 -> float32", MATMUL, "identity<2>"),
        ("sm_90a", F32, MATMUL, "identity<2>"),
    ],
)
def test_gpus_pack_what_tensor_cores_read(arch, types, rest, rhs):
    assert _layouts({"kind": "cuda", "arch": arch}, types, rest) == ["identity<2>", rhs, "identity<2>"]


def test_gpus_read_no_operand_that_is_stored_for_a_cpu():
    target = tvm.target.Target(CUDA)
    with pytest.raises(EncodingError, match=r"found rhs stored as pack<.*expected a permutation"):
        resolver_for(target).kernel(_problem(target, MATMUL.replace("?", "3")), target)


@pytest.mark.parametrize("target", [AVX512, AVX2, NEON, C])
@pytest.mark.parametrize("types", ["float32 * int8 -> float32", "float8_e4m3fn * float8_e4m3fn -> float32"])
def test_types_that_no_machine_multiplies(target, types):
    assert _layouts(target, types, MATMUL) == [None] * 3


def test_batch_dimensions_stay_outermost():
    weight = "(b0, m, k) * (k, n) -> (b0, m, n); b0=3, m=?, n=100, k=7"
    assert _layouts(AVX512, F32, weight) == ["identity<3>", "pack<outer=[1, 0] inner=[1:32]>", "identity<3>"]
    assert _layouts(C, F32, weight)[0] == "pack<outer=[0, 1, 2] inner=[1:8]>"
    attention = "(b0, m, b1, k) * (b0, n, b1, k) -> (b0, b1, m, n); b0=2, b1=12, m=?, n=?, k=64"
    assert _layouts(AVX512, F32, attention) == [
        "identity<4>",
        "pack<outer=[0, 2, 1, 3] inner=[1:32]>",
        "identity<4>",
    ]
    assert _layouts(C, F32, attention)[0] == "pack<outer=[0, 2, 1, 3] inner=[1:8]>"


def test_a_small_activation_is_not_packed():
    small = "(b0, m, k) * (b0, k, n) -> (b0, m, n); b0=12, m=128, n=64, k=128"
    assert _layouts(AVX512, F32, small)[1] == "identity<3>"
    large = small.replace("n=64, k=128", "n=1024, k=1024")
    assert _layouts(AVX512, F32, large)[1] == "pack<outer=[0, 2, 1] inner=[2:32]>"
    bytes_in_fours = _layouts(AVX512, "uint8 * int8 -> int32", small)[1]
    assert bytes_in_fours == "pack<outer=[0, 2, 1] inner=[2:32, 1:4]>"


def test_an_activation_of_few_rows_is_not_packed():
    def layout(types, rest, m, target=AVX512):
        encoding = Encoding.parse(f"matmul[1]<{types}; {rest.replace('m=?', f'm={m}')}>")
        return str(resolver_for(target).resolve_activation(encoding, tvm.target.Target(target)))

    assert {layout(F32, MATMUL, m) for m in (0, 1, 8)} == {"identity<2>"}
    assert {layout(F32, MATMUL, m) for m in ("?", 9)} == {"pack<outer=[1, 0] inner=[1:32]>"}
    transposed = MATMUL.replace("* (k, n)", "* (n, k)")
    assert layout(F32, transposed, 1) == "pack<outer=[0, 1] inner=[0:32]>"
    assert layout("uint8 * int8 -> int32", MATMUL, 1) == "pack<outer=[1, 0] inner=[1:32, 0:4]>"
    halves = [layout("float16 * float16 -> float32", MATMUL, m, FP16) for m in (8, 9)]
    assert halves == ["identity<2>", "pack<outer=[1, 0] inner=[1:32, 0:2]>"]


@pytest.mark.parametrize("target", [AVX512, AVX2, SSE, NEON, C])
@pytest.mark.parametrize("types", sorted({" * ".join(p.types[:2]) + f" -> {p.types[2]}" for p in DOT_INSTRUCTIONS}))
def test_one_weight_layout_serves_every_m(target, types):
    layouts = {_layouts(target, types, MATMUL.replace("m=?", f"m={m}"))[1] for m in ("?", 0, 1, 8, 1000)}
    exists = dot_instruction_for(cpu_target_of(tvm.target.Target(target)), *types.replace(" -> ", " * ").split(" * "))
    assert exists or types == "int16 * int8 -> int32"  # for CPUs without dot products of bytes only
    assert len(layouts) == 1 and (None in layouts) == (exists is None)


def test_a_narrow_weight_has_narrow_panels():
    assert _layouts(AVX512, F32, "(m, k) * (k, n) -> (m, n); m=?, n=10, k=7")[1] == "pack<outer=[1, 0] inner=[1:16]>"


def test_storage_size():
    target = tvm.target.Target(AVX512)
    encoding = Encoding.parse(f"matmul[1]<int8 * int8 -> int32; {MATMUL}>")
    resolver = resolver_for(target)
    assert resolver.storage_size(encoding, (7, 100), target) == 4 * (1 + 2) * 32 * 4  # panels, blocks, columns, bytes
    assert resolver.storage_size(encoding.of(0), (5, 7), target) == 35
    rows = tirx.Var("rows", "int64")
    size = resolver.storage_size(encoding.of(2), (rows, 100), target)
    analyzer = tvm.sym.Analyzer()
    analyzer.bind(rows, tirx.IntImm("int64", 3))
    assert int(analyzer.simplify(size)) == 3 * 100 * 4
    cuda = tvm.target.Target(CUDA)
    assert resolver_for(cuda).storage_size(encoding, (7, 100), cuda) == 2 * 1 * 64 * 128  # tiles, columns, bytes


def _problem(target, rest):
    encoding = Encoding.parse(f"matmul[0]<{F32}; {rest}>")
    resolver = resolver_for(tvm.target.Target(AVX512))
    operands = []
    for index in range(3):
        own = encoding.of(index)
        operands.append(
            Operand(own.shape(), own.element_type, own.index_map, resolver.resolve(own, tvm.target.Target(AVX512)))
        )
    return MatmulProblem(*operands, "float32")


def test_kernel_takes_the_operands_as_stored():
    target = tvm.target.Target(AVX512)
    problem = _problem(target, "(m, k) * (k, n) -> (m, n); m=5, n=100, k=7")
    kernel = resolver_for(target).kernel(problem, target)
    shapes = [tuple(map(int, parameter.shape)) for parameter in kernel.params]
    assert shapes == [(5, 7), (4, 7, 32), (5, 100)]
    assert cpu_target_of(target).isa.name == "avx512"
