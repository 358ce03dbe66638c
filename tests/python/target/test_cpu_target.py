"""Every target finds its row of the table of instruction sets."""

from __future__ import annotations

import pytest
import tvm

from relax_hetero.target.cpu_target import INSTRUCTION_SETS, cpu_target_of

X86, ARM = "x86_64-linux-gnu", "aarch64-linux-gnu"


@pytest.mark.parametrize(
    "target, row",
    [
        ({"kind": "llvm", "mtriple": X86, "mcpu": "znver5"}, "avx512"),
        ({"kind": "llvm", "mtriple": X86, "mcpu": "x86-64-v4"}, "avx512"),
        ({"kind": "llvm", "mtriple": X86, "mcpu": "x86-64-v4", "mattr": ["-avx512bw"]}, "avx2"),
        ({"kind": "llvm", "mtriple": X86, "mcpu": "x86-64-v3"}, "avx2"),
        ({"kind": "llvm", "mtriple": X86, "mcpu": "x86-64-v3", "mattr": ["-fma"]}, "sse"),
        ({"kind": "llvm", "mtriple": X86}, "sse"),
        ({"kind": "llvm", "mtriple": ARM, "mattr": ["+neon"]}, "neon"),
        ({"kind": "llvm", "mtriple": ARM, "mcpu": "neoverse-v1"}, "neon"),
        ({"kind": "llvm", "mtriple": "riscv64-linux-gnu"}, "generic"),
        ({"kind": "c"}, "generic"),
        ({"kind": "cuda", "arch": "sm_90"}, "generic"),
    ],
)
def test_rows(target, row):
    assert cpu_target_of(tvm.target.Target(target)).isa.name == row


def test_cores_and_lanes():
    cpu = cpu_target_of(tvm.target.Target({"kind": "llvm", "mtriple": X86, "mcpu": "x86-64-v3", "num-cores": 6}))
    assert cpu.cores == 6
    assert [cpu.lanes(dtype) for dtype in ("float64", "float32", "bfloat16", "int8")] == [4, 8, 16, 32]
    nothing_known = cpu_target_of(tvm.target.Target("c"))
    assert (nothing_known.cores, nothing_known.lanes("int8"), nothing_known.kind) == (1, 1, "c")


def test_features_beyond_the_row():
    arm = cpu_target_of(tvm.target.Target({"kind": "llvm", "mtriple": ARM, "mcpu": "neoverse-v1"}))
    assert {"dotprod", "i8mm", "bf16"} <= arm.features
    x86 = cpu_target_of(tvm.target.Target({"kind": "llvm", "mtriple": X86, "mcpu": "znver5"}))
    assert {"avx512vnni", "avx512bf16"} <= x86.features


def test_tiles_need_linux():
    xeon = {"kind": "llvm", "mcpu": "sapphirerapids"}
    for triple, has_tiles in ((X86, True), ("x86_64-apple-macosx", False), ("x86_64-pc-windows-msvc", False)):
        features = cpu_target_of(tvm.target.Target({**xeon, "mtriple": triple})).features
        assert ("amx-tile" in features) == has_tiles
        assert "avx512bf16" in features


def test_the_last_row_fits_everything():
    assert INSTRUCTION_SETS[-1].features == () and INSTRUCTION_SETS[-1].arch == ""
