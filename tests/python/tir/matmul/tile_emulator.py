"""Tile registers in C, on machines that have none: kernels whose instructions are replaced by calls of it."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import tvm
from tvm import tirx
from tvm_ffi import structural_map

# As the Intel SDM describes the instructions: rows beyond a tile's own are not touched, products of bytes are exact,
# those of bfloat16 are added in pairs. What may not be used is an abort.
_SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static _Thread_local uint8_t rows_of[8], bytes_of[8], data[8][16][64];
static _Thread_local int configured;
int64_t tiles_products, tiles_open;
int tiles_permission = 1;
int emulated_may_use_tiles(void) { return tiles_permission; }
void emulated_ldtilecfg(const uint8_t* words) {
  if (words[0] != 1 || configured) abort();
  for (int t = 0; t < 8; t++) {
    rows_of[t] = words[48 + t]; bytes_of[t] = words[16 + 2 * t];
    if (bytes_of[t] < 4 || bytes_of[t] > 64 || bytes_of[t] % 4 || words[17 + 2 * t]) abort();
    if (rows_of[t] < 1 || rows_of[t] > 16) abort();
  }
  memset(data, 0, sizeof data);
  configured = 1;
  __atomic_add_fetch(&tiles_open, 1, __ATOMIC_RELAXED);
}
void emulated_tilerelease(void) { configured = 0; __atomic_add_fetch(&tiles_open, -1, __ATOMIC_RELAXED); }
void emulated_tilezero(int8_t t) { if (!configured) abort(); memset(data[t], 0, sizeof data[t]); }
void emulated_tileload(int8_t t, const uint8_t* from, int64_t stride) {
  if (!configured) abort();
  memset(data[t], 0, sizeof data[t]);
  for (int r = 0; r < rows_of[t]; r++) memcpy(data[t][r], from + r * stride, bytes_of[t]);
}
void emulated_tilestore(int8_t t, uint8_t* to, int64_t stride) {
  if (!configured) abort();
  for (int r = 0; r < rows_of[t]; r++) memcpy(to + r * stride, data[t][r], bytes_of[t]);
}
static float wide(uint16_t half) { uint32_t bits = (uint32_t)half << 16; float x; memcpy(&x, &bits, 4); return x; }
static void check(int8_t c, int8_t a, int8_t b) {
  if (!configured || rows_of[c] != rows_of[a] || 4 * rows_of[b] != bytes_of[a] || bytes_of[b] != bytes_of[c]) abort();
  __atomic_add_fetch(&tiles_products, 1, __ATOMIC_RELAXED);
}
void emulated_tdpbf16ps(int8_t c, int8_t a, int8_t b) {
  check(c, a, b);
  for (int m = 0; m < rows_of[c]; m++) for (int k = 0; k < 16; k++) for (int n = 0; n < 16; n++) {
    float sum; memcpy(&sum, data[c][m] + 4 * n, 4);
    uint16_t *left = (uint16_t*)data[a][m] + 2 * k, *right = (uint16_t*)data[b][k] + 2 * n;
    for (int i = 0; i < 2; i++) sum += wide(left[i]) * wide(right[i]);
    memcpy(data[c][m] + 4 * n, &sum, 4);
  }
}
#define BYTES(name, left, right)                                                                                   \
  void emulated_##name(int8_t c, int8_t a, int8_t b) {                                                             \
    check(c, a, b);                                                                                                \
    for (int m = 0; m < rows_of[c]; m++) for (int k = 0; k < 16; k++) for (int n = 0; n < 16; n++) {               \
      int32_t sum; memcpy(&sum, data[c][m] + 4 * n, 4);                                                            \
      for (int i = 0; i < 4; i++) sum += (int32_t)((left*)data[a][m])[4 * k + i] * ((right*)data[b][k])[4 * n + i];\
      memcpy(data[c][m] + 4 * n, &sum, 4);                                                                         \
    }                                                                                                              \
  }
BYTES(tdpbusd, uint8_t, int8_t)
BYTES(tdpbssd, int8_t, int8_t)
BYTES(tdpbsud, int8_t, uint8_t)
BYTES(tdpbuud, uint8_t, uint8_t)
"""
_NAMES = {
    "llvm.x86.ldtilecfg": "emulated_ldtilecfg",
    "llvm.x86.tilerelease": "emulated_tilerelease",
    "llvm.x86.tilezero": "emulated_tilezero",
    "llvm.x86.tileloadd64": "emulated_tileload",
    "llvm.x86.tileloaddt164": "emulated_tileload",
    "llvm.x86.tilestored64": "emulated_tilestore",
    **{f"llvm.x86.{name}": f"emulated_{name}" for name in ("tdpbf16ps", "tdpbusd", "tdpbssd", "tdpbsud", "tdpbuud")},
}


@cache
def emulator() -> ctypes.CDLL:
    """The emulator, whose functions compiled kernels find."""
    folder = Path(mkdtemp())
    (folder / "tiles.c").write_text(_SOURCE)
    library = folder / "tiles.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, folder / "tiles.c"], check=True)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def products_so_far() -> int:
    """Products of tiles since the process began; no task may have left its tiles configured."""
    assert ctypes.c_int64.in_dll(emulator(), "tiles_open").value == 0
    return ctypes.c_int64.in_dll(emulator(), "tiles_products").value


def emulated(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with calls of the emulator in place of tile instructions; permission is given
    unless `tiles_permission` of the emulator is 0."""

    def on_call(call: tvm.ir.Call) -> tvm.ir.Call:
        name = getattr(call.op, "name", "")
        if name == "tirx.call_llvm_intrin":
            intrinsic = str(tvm.get_global_func("target.llvm_get_intrinsic_name")(int(call.args[0])))
            if intrinsic in _NAMES:
                return tirx.call_extern("void", _NAMES[intrinsic], *call.args[1:])
            assert "tile" not in intrinsic
            assert "tdp" not in intrinsic
        if name == "tirx.call_extern" and call.args[0].value == "relax_hetero_may_use_tiles":
            return tirx.call_extern("int32", "emulated_may_use_tiles")
        return call

    return kernel.with_body(structural_map(kernel.body, (tvm.ir.Call, on_call)))
