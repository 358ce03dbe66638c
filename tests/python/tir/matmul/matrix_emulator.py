"""Matrix instructions of AArch64 in C, on other machines: kernels whose instructions are replaced by calls of it."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import tvm
from tvm import tirx
from tvm_ffi import structural_map

# As the Arm ARM describes the instructions: row i of the first factor by row j of the second one is added to element
# 2i + j. Products of bytes are exact; those of bfloat16 are added in float32 here, the instruction rounds otherwise.
_SOURCE = r"""
#include <stdint.h>
#include <string.h>
typedef int32_t ints __attribute__((vector_size(16)));
typedef float floats __attribute__((vector_size(16)));
typedef int8_t bytes __attribute__((vector_size(16)));
typedef int64_t words __attribute__((vector_size(16)));
int64_t matrix_products;
static float wide(uint16_t half) { uint32_t bits = (uint32_t)half << 16; float x; memcpy(&x, &bits, 4); return x; }
#define BYTES(name, left, right)                                                                                   \
  ints emulated_##name(ints sums, bytes first, bytes second) {                                                     \
    __atomic_add_fetch(&matrix_products, 1, __ATOMIC_RELAXED);                                                     \
    for (int i = 0; i < 2; i++) for (int j = 0; j < 2; j++) for (int k = 0; k < 8; k++)                            \
      sums[2 * i + j] += (int32_t)(left)first[8 * i + k] * (right)second[8 * j + k];                               \
    return sums;                                                                                                   \
  }
BYTES(smmla, int8_t, int8_t)
BYTES(ummla, uint8_t, uint8_t)
BYTES(usmmla, uint8_t, int8_t)
floats emulated_bfmmla(floats sums, words first, words second) {
  uint16_t left[8], right[8];
  __atomic_add_fetch(&matrix_products, 1, __ATOMIC_RELAXED);
  memcpy(left, &first, 16); memcpy(right, &second, 16);
  for (int i = 0; i < 2; i++) for (int j = 0; j < 2; j++) for (int k = 0; k < 4; k++)
    sums[2 * i + j] += wide(left[4 * i + k]) * wide(right[4 * j + k]);
  return sums;
}
"""
_NAMES = {f"llvm.aarch64.neon.{name}": f"emulated_{name}" for name in ("smmla", "ummla", "usmmla")}
_IN_LLVM = "relax_hetero_bf16_dot"


@cache
def emulator() -> ctypes.CDLL:
    """The emulator, whose functions compiled kernels find."""
    folder = Path(mkdtemp())
    (folder / "matrix.c").write_text(_SOURCE)
    library = folder / "matrix.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, folder / "matrix.c"], check=True)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def products_so_far() -> int:
    """Matrix instructions since the process began."""
    return ctypes.c_int64.in_dll(emulator(), "matrix_products").value


def emulated(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel, written for AArch64, with calls of the emulator in place of matrix instructions."""

    def on_call(call: tvm.ir.Call) -> tvm.ir.Call:
        name = getattr(call.op, "name", "")
        dtype = call.ty.dtype if name.startswith("tirx.call_") else None
        if name == "tirx.call_llvm_pure_intrin":
            intrinsic = str(tvm.get_global_func("target.llvm_get_intrinsic_name")(int(call.args[0])))
            assert intrinsic in _NAMES or "aarch64" not in intrinsic
            if intrinsic in _NAMES:
                return tirx.call_pure_extern(dtype, _NAMES[intrinsic], *call.args[1:])
        if name == "tirx.call_pure_extern" and call.args[0].value == _IN_LLVM:
            return tirx.call_pure_extern(dtype, "emulated_bfmmla", *call.args[1:])
        return call

    def without_import(statement: tirx.AttrStmt) -> tirx.Stmt:
        return statement.body if "bfmmla" in str(statement.value) else statement

    body = structural_map(kernel.body, [(tvm.ir.Call, on_call), (tirx.AttrStmt, without_import)])
    return kernel.with_body(body)
