"""The peak of the CPU's arithmetic: a loop of multiply-adds in registers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from relax_hetero.target.cpu_target import CpuTarget, cpu_target_of

from .relax_module import native_target
from .shape import Unsupported

# Independent chains by lanes: more than latency (4 to 5 cycles) times units (2) of any of these CPUs.
_CHAINS = {32: 24, 16: 12}
_STEPS = 20_000
_BF16 = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define <16 x float> @peak_bf16(<16 x float> %c, <16 x i32> %a, <16 x i32> %b) {
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}
"""


@dataclass(frozen=True)
class Peak:
    """A loop to be timed.

    Attributes
    ----------
    run : Callable
        Runs the loop once on every thread.
    operations : int
        Multiplications and additions of a run on all threads.
    assembly : str
        Assembly of the loop.
    """

    run: tvm.runtime.PackedFunc
    operations: int
    assembly: str

    def __call__(self) -> None:
        """Run once."""
        self.run()


def peak(kind: str, threads: int) -> Peak:
    """The loop for an element type on this CPU.

    Raises
    ------
    Unsupported
        If this module knows no instruction of the CPU for the type.
    """
    target = native_target(threads)
    machine = cpu_target_of(target)
    lanes = machine.lanes("float32")
    width, element = _width(kind, machine)
    chains = _CHAINS[machine.isa.registers]
    function = _loop(kind, threads, lanes, chains, element)
    executable = tvm.compile(tvm.IRModule({"peak": function}), target=target)
    sums = tvm.runtime.tensor(np.zeros((threads, chains * lanes), element))
    factors = tvm.runtime.tensor(np.zeros(2 * lanes, element))
    loop = executable["peak"]
    operations = 2 * width * lanes * chains * _STEPS * threads
    return Peak(lambda: loop(factors, sums), operations, executable.mod.inspect_source("asm"))


def _width(kind: str, machine: CpuTarget) -> tuple[int, str]:
    """Multiplications that one instruction does per 32-bit lane, and the type of its accumulators."""
    if kind == "f32" and machine.isa.vector_bytes >= 32:
        return 1, "float32"
    if kind in ("u8s8", "s8s8") and machine.isa.name == "avx512" and "avx512vnni" in machine.features:
        return 4, "int32"
    if kind == "bf16" and machine.isa.name == "avx512" and "avx512bf16" in machine.features:
        return 2, "float32"
    raise Unsupported(f"no loop for {kind} on {machine.isa.name}")


def _loop(kind: str, threads: int, lanes: int, chains: int, element: str) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("peak")
        T.func_attr({"tirx.noalias": True, "global_symbol": "peak"})
        factors = T.arg("factors", T.buffer((2 * lanes,), element))
        sums = T.arg("sums", T.buffer((threads, chains * lanes), element))
        vector = T.ramp(0, 1, lanes)
        with T.sblock("root"), T.attr(0, "pragma_import_llvm", _BF16), T.parallel(threads) as thread:
            # Allocations below 1,024 bytes are stack slots, which LLVM keeps in registers: one per vector.
            chain = [T.alloc_buffer((lanes,), element, scope="global") for _ in range(chains)]
            for number in range(chains):
                T.buffer_store(chain[number], sums[thread, T.ramp(number * lanes, 1, lanes)], [vector])
            with T.serial(_STEPS):
                for number in range(chains):
                    a, b = factors[vector], factors[T.ramp(lanes, 1, lanes)]
                    T.buffer_store(chain[number], _step(kind, chain[number][vector], a, b, lanes), [vector])
            for number in range(chains):
                T.buffer_store(sums, chain[number][vector], [thread, T.ramp(number * lanes, 1, lanes)])
    return builder.get()


def _step(kind: str, value: tvm.ir.Expr, a: tvm.ir.Expr, b: tvm.ir.Expr, lanes: int) -> tvm.ir.Expr:
    if kind == "f32":
        return value * a + b  # value + a * b would multiply only once, before the loop
    if kind == "bf16":
        ints = (tirx.reinterpret(f"int32x{lanes}", operand) for operand in (a, b))
        return tirx.call_pure_extern(f"float32x{lanes}", "peak_bf16", value, *ints)
    bytes_of = (tirx.reinterpret(f"int8x{4 * lanes}", operand) for operand in (a, b))
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", "llvm.x86.avx512.vpdpbusd.512", value, *bytes_of)
