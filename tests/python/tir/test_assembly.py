"""The main loop of every matrix product keeps its accumulators in registers: read from the assembly."""

from __future__ import annotations

import re

import pytest
import tvm

from relax_hetero.encoding import Encoding, Epilogue, Expression, MatmulProblem, Operand, PackedLayout, resolver_for
from relax_hetero.encoding.machine import machine_of
from relax_hetero.encoding.products import PRODUCTS

X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "num-cores": 2}
TARGETS = {
    "avx512": {**X86, "mcpu": "x86-64-v4", "mattr": ["+avx512vnni", "+avx512bf16"]},
    "avx512 base": {**X86, "mcpu": "x86-64-v4"},
    "avx2": {**X86, "mcpu": "x86-64-v3"},
    "avx2 vnni": {**X86, "mcpu": "x86-64-v3", "mattr": ["+avxvnni"]},
}
TYPES = sorted({product.types for product in PRODUCTS})
MULTIPLY = r"vfn?madd|vpdpbusd|vdpbf16ps|vpmaddwd|vpmulld|vpmullq|vpmuludq"
# LLVM uses %rbp as any other register here; what it spills stands relative to %rsp.
ON_STACK = r"[xyz]mm.*\(%rsp|\(%rsp.*[xyz]mm"


def _kernel_assembly(target, types, sizes, expression=None, others=()):
    """Assembly of the kernel for (m, k) * (k, n); sizes are ints, or names where symbolic."""
    target = tvm.target.Target(target)
    text = ", ".join(f"{name}={size if isinstance(size, int) else '?'}" for name, size in sizes.items())
    encoding = Encoding.parse("matmul[0]<{} * {} -> {}; (m, k) * (k, n) -> (m, n); {}>".format(*types, text))
    resolver = resolver_for(target)
    operands = []
    for index in range(3):
        own = encoding.of(index)
        shape = tuple(sizes[name] for name in own.index_map)
        operands.append(Operand(shape, own.element_type, own.index_map, resolver.resolve(own, target)))
    epilogue = None
    if expression is not None:
        plain = tuple(
            Operand(tuple(sizes[name] for name in names), types[2], names, PackedLayout.identity(len(names)))
            for names in others
        )
        epilogue = Epilogue(Expression.parse(expression), plain)
    kernel = resolver.kernel(MatmulProblem(*operands, types[2], epilogue=epilogue), target)
    return tvm.compile(tvm.IRModule({"matmul": kernel}), target=target).mod.inspect_source("asm")


def _innermost_loops(assembly):
    """Bodies of loops that hold no label: from a label to the jump back to it."""
    lines = assembly.splitlines()
    labels, bodies = {}, []
    for number, line in enumerate(lines):
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = number
        elif (jump := re.match(r"\s+j\w+\s+(\.LBB\w+)", line)) and jump[1] in labels:
            body = lines[labels[jump[1]] + 1 : number]
            if not any(line.startswith(".LBB") for line in body):
                bodies.append(body)
    return bodies


def _count(pattern, body):
    return sum(bool(re.search(pattern, line)) for line in body)


def _main_loops(assembly):
    """The loops that multiply at least half as often as the one that multiplies most."""
    bodies = _innermost_loops(assembly)
    most = max((_count(MULTIPLY, body) for body in bodies), default=0)
    assert most >= 4, f"no loop that multiplies:\n{assembly}"
    return [body for body in bodies if 2 * _count(MULTIPLY, body) >= most]


def _assert_in_registers(assembly):
    for body in _main_loops(assembly):
        assert not _count(ON_STACK, body), "\n".join(body)


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("name", TARGETS)
def test_no_spill_for_any_type(name, types):
    _assert_in_registers(_kernel_assembly(TARGETS[name], types, {"m": 64, "n": 128, "k": 256}))


FLOATS, BYTES = ("float32",) * 3, ("uint8", "int8", "int32")


@pytest.mark.parametrize("m", [1, 2, 4, 8, 15, 32, "s0"])
@pytest.mark.parametrize("types", [FLOATS, BYTES], ids="-".join)
@pytest.mark.parametrize("name", ["avx512", "avx2"])
def test_no_spill_for_any_height(name, types, m):
    _assert_in_registers(_kernel_assembly(TARGETS[name], types, {"m": m, "n": 130, "k": 259}))


@pytest.mark.parametrize("name", ["avx512", "avx2"])
def test_no_spill_with_an_epilogue(name):
    expression = "maximum(add(gelu(add(x0, x1)), x2), 0.0)"
    _assert_in_registers(
        _kernel_assembly(TARGETS[name], FLOATS, {"m": 64, "n": 100, "k": 256}, expression, [("n",), ("m", "n")])
    )


@pytest.mark.parametrize("name", ["avx512", "avx2"])
def test_no_spill_where_all_is_symbolic(name):
    _assert_in_registers(_kernel_assembly(TARGETS[name], FLOATS, {"m": "s0", "n": "s1", "k": "s2"}))


def test_the_main_loop_is_as_wide_as_the_machine():
    target = TARGETS["avx512"]
    assert machine_of(tvm.target.Target(target)).isa.name == "avx512"
    for types, instruction in [(FLOATS, r"vfmadd.*%zmm"), (BYTES, r"vpdpbusd.*%zmm")]:
        bodies = _main_loops(_kernel_assembly(target, types, {"m": 64, "n": 128, "k": 256}))
        assert all(_count(instruction, body) >= 8 for body in bodies)
