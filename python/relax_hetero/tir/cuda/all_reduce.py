"""All-reduce over GPUs that access each other's memory: one kernel a GPU, without a copy and without the host.

Each GPU has memory that the others write to (`artifact.peer_layout`). There are two protocols:

- Short operands: every GPU sends its whole operand, and adds all in the order of the GPUs, so that all get the same
  bits ("one-shot", as in TensorRT-LLM and vLLM). Each eight bytes are stored beside the kernel's epoch, twice, in one
  access of 16 bytes, so that whoever reads the epoch has the data (NCCL's LL). It takes twice the bytes, but neither
  fences nor flags.
- Long operands: GPU r adds the r-th part of the rows, which the others send it, and sends them the result
  ("two-shot": reduce-scatter, then all-gather). A block that has sent its rows, or results, sets a flag, for which the
  same block of the other GPU waits.

An RMS norm of the rows, which follows most sums of language models, is a part of both: a row's threads have the whole
row in registers. Long sums then send the norm's result; the sum itself stays where it was added, and the next long sum
adds it there as its residual. If the result is float16, as the operands of the next products, so are the rows that are
sent, each times a power of two, so that they cannot overflow.

The epoch of a slot is the number of kernels that used it, so that nothing ever is reset. A slot may be written again
when no GPU reads it any more: consecutive kernels use different slots, and when one has ended, all GPUs have ended the
one before it. `slots_of` numbers them so that this holds between calls, too. So each kernel ends the epoch of the one
before it, which no block reads any more.

Kernels of a program must begin in the same order on all GPUs. Each takes the last one's result as an operand that it
does not read, so that passes keep their order. All blocks of a kernel must be resident at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...artifact.peer_layout import FLAG_BLOCKS, data_offset, flags_offset, state_offset
from ...target.gpu_target import WARP
from ..core.builder import Function
from .loops.launch import launch

ALL_REDUCE = "relax_hetero.all_reduce"
"""On a PrimFunc: it exchanges values with the kernels of other devices; JSON of a `RankReduce`."""

AFTER_NCCL = "relax_hetero.after_nccl"
"""On a PrimFunc that NCCL's kernels precede: the number of the collective among those of the function, the GPU's rank,
and the indices of the mesh's devices."""

_THREADS = 512
_MAX_THREADS = 1024
_LONG_BLOCKS = 128
_MAX_COPY_BLOCKS = 1024
_TIMEOUT_SECONDS = 60

LL_BYTES = 512 << 10
"""Maximum bytes of a short operand: for longer ones, sending twice the bytes takes longer than fences."""

_MAX_LL_PAIRS = 8
_MAX_VECTORS = 4
"""Maximum registers of a thread for a row, in pairs (short operands) and fours (long ones) of numbers."""

_SOURCE = (
    f"""
#define RH_FLAG_BLOCKS {FLAG_BLOCKS}
#define RH_TIMEOUT_SECONDS {_TIMEOUT_SECONDS}
"""
    r"""
__device__ __forceinline__ unsigned long long rh_time() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
__device__ __forceinline__ void rh_check_time(unsigned long long begin) {
  if (rh_time() - begin > RH_TIMEOUT_SECONDS * 1000000000ull) __trap();
}

// Memory that the GPUs of a mesh write to, as one kernel uses it.
template <int RANK, int RANKS> struct rh_Exchange {
  const long long* bases;
  long long data, slot_bytes, flags, state;
  int number;

  __device__ __forceinline__ static int peer(int step) { return (RANK + step) % RANKS; }
  __device__ __forceinline__ char* slot(int owner, int sender) const {
    return (char*)bases[owner] + data + sender * slot_bytes;
  }
  // Epoch of the slot. The kernel also ends that of the slot before, which it does not read.
  __device__ __forceinline__ unsigned begin_epoch() const {
    unsigned* words = (unsigned*)((char*)bases[RANK] + state);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      if (words[0]) words[words[0]] += 1;
      words[0] = number + 1;
    }
    return *(const volatile unsigned*)(words + 1 + number) + 1;
  }
  __device__ __forceinline__ unsigned* flag(int owner, int sender) const {
    return (unsigned*)((char*)bases[owner] + flags) + sender * RH_FLAG_BLOCKS + blockIdx.x;
  }
  // What the block has stored is visible to the same block of other GPUs that has waited for the flag.
  __device__ __forceinline__ void signal(unsigned value) const {
    __syncthreads();
    if (threadIdx.x < RANKS && threadIdx.x != RANK) {
      asm volatile("fence.acq_rel.sys; st.release.sys.global.u32 [%0], %1;"
                   :: "l"(flag(threadIdx.x, RANK)), "r"(value) : "memory");
    }
  }
  __device__ __forceinline__ void wait(unsigned value) const {
    if (threadIdx.x < RANKS && threadIdx.x != RANK) {
      unsigned seen;
      unsigned long long begin = rh_time();
      do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag(RANK, threadIdx.x)) : "memory");
        rh_check_time(begin);
      } while ((int)(seen - value) < 0);
    }
    __syncthreads();
  }
};

__device__ __forceinline__ float4 rh_add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 rh_scale(float4 v, float by) {
  return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}
__device__ __forceinline__ unsigned rh_to_half(float x, float y) {
  unsigned h;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(y), "f"(x));
  return h;
}
__device__ __forceinline__ float2 rh_from_half(unsigned h) {
  float2 v;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(v.x), "=f"(v.y) : "r"(h));
  return v;
}
template <bool HALF> __device__ __forceinline__ void rh_store(void* out, long long i, float4 v) {
  if (HALF) ((uint2*)out)[i] = make_uint2(rh_to_half(v.x, v.y), rh_to_half(v.z, v.w));
  else ((float4*)out)[i] = v;
}
template <bool HALF> __device__ __forceinline__ void rh_store(void* out, long long i, float2 v) {
  if (HALF) ((unsigned*)out)[i] = rh_to_half(v.x, v.y); else ((float2*)out)[i] = v;
}
template <bool HALF> __device__ __forceinline__ float4 rh_load(const void* from, long long i) {
  if (!HALF) return __ldcg((const float4*)from + i);
  uint2 h = __ldcg((const uint2*)from + i);
  float2 a = rh_from_half(h.x), b = rh_from_half(h.y);
  return make_float4(a.x, a.y, b.x, b.y);
}
// Sum, or maximum, over the threads of a block, which all get.
template <bool MAX> __device__ __forceinline__ float rh_reduce(float value) {
  __shared__ float partial[32];
  for (int lanes = 16; lanes; lanes /= 2) {
    float other = __shfl_xor_sync(~0u, value, lanes);
    value = MAX ? fmaxf(value, other) : value + other;
  }
  __syncthreads();  // the last result has been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) value = MAX ? fmaxf(value, partial[warp]) : value + partial[warp];
  return value;
}

// Short operands. A line has eight bytes and, twice, the epoch.
template <int PAIRS, int RANK, int RANKS, bool NORM, bool HALF, bool SUM>
__device__ __forceinline__ void rh_all_reduce_short(
    const float* x, const float*, const float* weight, void* out, float* sum, const void* bases,
    long long data, long long slot_bytes, long long flags, long long state, int number, int pairs, int row, float eps) {
  rh_Exchange<RANK, RANKS> ex{(const long long*)bases, data, slot_bytes, flags, state, number};
  unsigned now = ex.begin_epoch();
  for (int begin = blockIdx.x * row; begin < pairs; begin += gridDim.x * row) {
    int end = min(begin + row, pairs);
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
      uint2 v = ((const uint2*)x)[i];
      for (int step = 1; step < RANKS; ++step) {
        char* to = ex.slot(ex.peer(step), RANK) + 16ll * i;
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" :: "l"(to), "r"(v.x), "r"(now), "r"(v.y));
      }
    }
  }
  for (int begin = blockIdx.x * row; begin < pairs; begin += gridDim.x * row) {
    int end = min(begin + row, pairs);
    float2 own[PAIRS], scale[PAIRS], total[PAIRS];
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      int i = begin + threadIdx.x + p * blockDim.x;
      own[p] = i < end ? ((const float2*)x)[i] : make_float2(0.0f, 0.0f);
      scale[p] = NORM && i < end ? ((const float2*)weight)[i - begin] : make_float2(1.0f, 1.0f);
      total[p] = make_float2(0.0f, 0.0f);
    }
    for (int other = 0; other < RANKS; ++other) {
      unsigned a[PAIRS], b[PAIRS], spins = 0;
      unsigned long long start = 0;
      bool waits = other != RANK;
      while (waits) {  // all lines are in flight together
        waits = false;
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
          int i = begin + threadIdx.x + p * blockDim.x;
          unsigned flag = now, flag2 = now;
          a[p] = b[p] = 0;
          if (i < end) {
            asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a[p]), "=r"(flag), "=r"(b[p]), "=r"(flag2) : "l"(ex.slot(RANK, other) + 16ll * i));
          }
          waits |= flag != now || flag2 != now;
        }
        if (waits && ++spins % 65536 == 0) { if (!start) start = rh_time(); else rh_check_time(start); }
      }
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        total[p].x += other == RANK ? own[p].x : __uint_as_float(a[p]);
        total[p].y += other == RANK ? own[p].y : __uint_as_float(b[p]);
      }
    }
    float inverse = 1.0f;
    if (NORM) {
      float squares = 0.0f;
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) squares += total[p].x * total[p].x + total[p].y * total[p].y;
      inverse = rsqrtf(rh_reduce<false>(squares) / (2 * row) + eps);
    }
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      int i = begin + threadIdx.x + p * blockDim.x;
      if (i >= end) continue;
      if (SUM) ((float2*)sum)[i] = total[p];
      float2 v = total[p];
      if (NORM) v = make_float2(v.x * inverse * scale[p].x, v.y * inverse * scale[p].y);
      rh_store<HALF>(out, i, v);
    }
  }
}

template <class Vector> __device__ __forceinline__ void rh_copy(const Vector* from, Vector* to, int begin, int end) {
  for (int i = begin + threadIdx.x; i < end; i += 4 * blockDim.x) {
    Vector v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) if (i + u * blockDim.x < end) v[u] = __ldcg(from + i + u * blockDim.x);
#pragma unroll
    for (int u = 0; u < 4; ++u) if (i + u * blockDim.x < end) to[i + u * blockDim.x] = v[u];
  }
}
// Rows as float16, each times a power of two that makes its largest number 2^14 or more, and the inverses of these.
template <int VECTORS> __device__ __forceinline__ void rh_send_rows(
    const float4* from, uint2* to, float* inverses, int begin, int end, int row) {
  for (; begin < end; begin += row) {
    float4 v[VECTORS];
    float largest = 0.0f;
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int i = threadIdx.x + u * blockDim.x;
      v[u] = i < row ? __ldcg(from + begin + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      largest = fmaxf(fmaxf(largest, fmaxf(fabsf(v[u].x), fabsf(v[u].y))), fmaxf(fabsf(v[u].z), fabsf(v[u].w)));
    }
    int exponent = max((int)(__float_as_uint(rh_reduce<true>(largest)) >> 23), 30) - 127;  // within float32, inverted
    float scale = __uint_as_float((unsigned)(127 + 14 - exponent) << 23);
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int i = threadIdx.x + u * blockDim.x;
      if (i < row) rh_store<true>(to, begin + i, rh_scale(v[u], scale));
    }
    if (threadIdx.x == 0) inverses[begin / row] = 1.0f / scale;
  }
}

// Long operands: GPU r adds part r, which the others send it, and sends them the result.
template <int VECTORS, int RANK, int RANKS, bool NORM, bool HALF, bool SUM, bool RESIDUAL>
__device__ __forceinline__ void rh_all_reduce_long(
    const float* x, const float* residual, const float* weight, void* out, float* sum, const void* bases,
    long long data, long long slot_bytes, long long flags, long long state, int number, int vectors, int row,
    float eps) {
  rh_Exchange<RANK, RANKS> ex{(const long long*)bases, data, slot_bytes, flags, state, number};
  unsigned now = ex.begin_epoch();
  int rows = (vectors + row - 1) / row, part_rows = (rows + RANKS - 1) / RANKS, part = part_rows * row;
  int piece = (part_rows + gridDim.x - 1) / gridDim.x * row, begin = blockIdx.x * piece;
  long long inverses = 8ll * part, results = 16ll * part;  // offsets in a slot, after the operand's part
  for (int step = 1; step < RANKS; ++step) {
    int peer = ex.peer(step), end = min(min(begin + piece, part), vectors - peer * part);
    const float4* from = (const float4*)x + (long long)peer * part;
    char* to = ex.slot(peer, RANK);
    if (HALF) rh_send_rows<VECTORS>(from, (uint2*)to, (float*)(to + inverses), begin, end, row);
    else rh_copy(from, (float4*)to, begin, end);
  }
  ex.signal(2 * now);
  ex.wait(2 * now);
  int last = min(min(begin + piece, part), vectors - RANK * part);
  for (int first = begin; first < last; first += row) {
    int end = min(first + row, last);
    float4 total[VECTORS];
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int i = first + threadIdx.x + u * blockDim.x;
      total[u] = RESIDUAL && i < end ? ((const float4*)residual)[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (int other = 0; other < RANKS; ++other) {
      const char* from = ex.slot(RANK, other);
      float inverse = HALF && other != RANK ? __ldcg((const float*)(from + inverses) + first / row) : 1.0f;
#pragma unroll
      for (int u = 0; u < VECTORS; ++u) {
        int i = first + threadIdx.x + u * blockDim.x;
        if (i >= end) continue;
        float4 v = other == RANK ? rh_load<false>(x, (long long)RANK * part + i) : rh_load<HALF>(from, i);
        total[u] = rh_add(total[u], HALF && other != RANK ? rh_scale(v, inverse) : v);
      }
    }
    float inverse = 1.0f;
    if (NORM) {
      float squares = 0.0f;
#pragma unroll
      for (int u = 0; u < VECTORS; ++u) {
        float4 v = total[u];
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      }
      inverse = rsqrtf(rh_reduce<false>(squares) / (4 * row) + eps);
    }
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int i = first + threadIdx.x + u * blockDim.x;
      if (i >= end) continue;
      if (SUM) ((float4*)sum)[i] = total[u];
      float4 v = total[u];
      if (NORM) {
        float4 w = ((const float4*)weight)[i - first];
        v = make_float4(v.x * inverse * w.x, v.y * inverse * w.y, v.z * inverse * w.z, v.w * inverse * w.w);
      }
      rh_store<HALF>(out, (long long)RANK * part + i, v);
      for (int step = 1; step < RANKS; ++step) rh_store<HALF>(ex.slot(ex.peer(step), RANK) + results, i, v);
    }
  }
  ex.signal(2 * now + 1);
  ex.wait(2 * now + 1);
  for (int step = 1; step < RANKS; ++step) {
    int peer = ex.peer(step), end = min(min(begin + piece, part), vectors - peer * part);
    const char* from = ex.slot(RANK, peer) + results;
    long long to = (long long)peer * part;
    if (HALF) rh_copy((const uint2*)from, (uint2*)out + to, begin, end);
    else rh_copy((const float4*)from, (float4*)out + to, begin, end);
  }
}

// Before NCCL's sum: the operand, and on each GPU its rows of the residual.
template <bool RESIDUAL> __device__ __forceinline__ void rh_stage(
    const float* x, const float* residual, float* token, const void* bases, int rank, int vectors, int part) {
  float4* to = (float4*)((const long long*)bases)[rank];
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) {
    float4 v = ((const float4*)x)[i];
    int own = i - rank * part;
    if (RESIDUAL && own >= 0 && own < part) v = rh_add(v, ((const float4*)residual)[own]);
    to[i] = v;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) token[0] = 0.0f;
}
// After it: the norm of the rows, and the sum from vector `begin` to `end`.
template <bool NORM, bool HALF, bool SUM> __device__ __forceinline__ void rh_finish(
    const void* weight, void* out, void* sum, const void* bases, int rank, int vectors, int row, int begin, int end,
    float eps) {
  const float4* from = (const float4*)((const long long*)bases)[rank];
  for (int first = blockIdx.x * row; first < vectors; first += gridDim.x * row) {
    int last = min(first + row, vectors);
    float inverse = 1.0f;
    if (NORM) {
      float squares = 0.0f;
      for (int i = first + threadIdx.x; i < last; i += blockDim.x) {
        float4 v = __ldcg(from + i);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      }
      inverse = rsqrtf(rh_reduce<false>(squares) / (4 * row) + eps);
    }
    for (int i = first + threadIdx.x; i < last; i += blockDim.x) {
      float4 v = __ldcg(from + i);
      if (SUM && i >= begin && i < end) ((float4*)sum)[i - begin] = v;
      if (NORM) {
        float4 w = ((const float4*)weight)[i - first];
        v = make_float4(v.x * inverse * w.x, v.y * inverse * w.y, v.z * inverse * w.z, v.w * inverse * w.w);
      }
      rh_store<HALF>(out, i, v);
    }
  }
}
"""
)


@dataclass(frozen=True)
class RowNorm:
    """RMS norm of the rows of a sum, with a weight for each column.

    Attributes
    ----------
    eps : float
        Number that is added to the mean of the squares.
    dtype : str
        Type of the result, float32 or float16.
    """

    eps: float
    dtype: str


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of float32, the same on all GPUs.

    Attributes
    ----------
    shape : tuple of int
        Shape of the operand.
    ranks : int
        Number of GPUs.
    norm : RowNorm or None
        Norm of the sum's rows.
    has_residual : bool
        True if each GPU adds its part of a residual to its part of the rows; only for long operands.
    """

    shape: tuple[int, ...]
    ranks: int
    norm: RowNorm | None = None
    has_residual: bool = False

    @property
    def count(self) -> int:
        """Numbers of the operand."""
        return prod(self.shape)

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def is_short(self) -> bool:
        """True if every GPU adds all; else each adds its part of the rows."""
        return 4 * self.count <= LL_BYTES

    @property
    def lanes(self) -> int:
        """Numbers that a thread sends at a time."""
        return 2 if self.is_short else 4

    @property
    def sum_shape(self) -> tuple[int, ...]:
        """Shape of the sum beside a norm's result: a GPU's part of the rows if the operand is long."""
        return self.shape if self.is_short else (self.count // self.width // self.ranks, self.width)

    @property
    def supports_rows(self) -> bool:
        """True if a norm can be a part of it, and a residual if it is long."""
        fits = self.width % 4 == 0 and self.width <= self.lanes * self._max_units * _MAX_THREADS
        return fits and (self.is_short or self.count // self.width % self.ranks == 0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that it needs for each GPU."""
        return 2 * LL_BYTES + (0 if self.is_short else 2 * 16 * self._part_vectors)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        if not self.is_short:
            return _MAX_THREADS
        return _THREADS if self.norm is None else min(_MAX_THREADS, max(2, ceil(self.row / 2 / WARP)) * WARP)

    @property
    def row(self) -> int:
        """Pairs (short operands) or fours of numbers that a block adds at a time: a row, if there are rows."""
        if self.norm is not None or self.has_residual:
            return self.width // self.lanes
        units = self.count // self.lanes
        if self.is_short:
            return ceil(units / max(1, min(FLAG_BLOCKS, units // _THREADS)))
        return min(_MAX_VECTORS * _MAX_THREADS, ceil(units / (self.ranks * _LONG_BLOCKS)))

    @property
    def blocks(self) -> int:
        """Blocks of a kernel."""
        rows = ceil(self.count // self.lanes / self.row)
        return min(FLAG_BLOCKS, rows) if self.is_short else min(_LONG_BLOCKS, ceil(rows / self.ranks))

    @property
    def _max_units(self) -> int:
        return _MAX_LL_PAIRS if self.is_short else _MAX_VECTORS

    @property
    def _part_vectors(self) -> int:
        return ceil(ceil(self.count // 4 / self.row) / self.ranks) * self.row


@dataclass(frozen=True)
class RankReduce:
    """The part of a GPU in an all-reduce.

    Attributes
    ----------
    reduce : AllReduce
    rank : int
        Number of this GPU among the GPUs.
    keeps_sum : bool
        True if there is a second result, the sum, beside that of the norm.
    why : str
        Reason why NCCL sums; empty for kernels that write to the memory of other GPUs.
    """

    reduce: AllReduce
    rank: int
    keeps_sum: bool = False
    why: str = ""

    def to_json(self) -> str:
        """Convert to JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankReduce:
        """Read `to_json`."""
        data = json.loads(text)
        reduce = data["reduce"]
        norm = None if reduce["norm"] is None else RowNorm(**reduce["norm"])
        return cls(**{**data, "reduce": AllReduce(**{**reduce, "shape": tuple(reduce["shape"]), "norm": norm})})


def supports(count: int, dtype: str) -> bool:
    """Return whether the kernel reduces tensors of so many elements of a type."""
    return dtype == "float32" and count % 4 == 0 and 0 < count < 1 << 31


def slots_of(count: int) -> list[int]:
    """Slots of two or more consecutive kernels of a function: neighbours differ, and the last is not the first."""
    return [2 if number and number == count - 1 and number % 2 == 0 else number % 2 for number in range(count)]


def all_reduce_kernel(
    reduce: AllReduce,
    rank: int,
    slot: int,
    slot_bytes: int,
    after: tuple[Sequence[int], str],
    keeps_sum: bool = False,
) -> tirx.PrimFunc:
    """Make the kernel of a GPU.

    Parameters
    ----------
    reduce : AllReduce
    rank : int
        Number of this GPU among the GPUs.
    slot : int
        Slot that it uses, see `slots_of`.
    slot_bytes : int
        Bytes of a slot for each GPU, at least `AllReduce.slot_bytes`.
    after : tuple
        Shape and type of the last kernel's result.
    keeps_sum : bool
        True if there is a second result, the sum, beside that of the norm.

    Returns
    -------
    tirx.PrimFunc
        Function of the operand; the addresses of all GPUs' memory, (ranks,) of int64; the last kernel's result, which
        only orders kernels; the residual, if there is one; the norm's weight, (width,) of float32, if there is a norm;
        and the results: that of the norm or the sum, then the sum of `AllReduce.sum_shape` if it is kept.
    """
    norm, shape = reduce.norm, list(reduce.shape)
    function = Function(f"all_reduce_{rank}", registers="local")
    with function:
        x = function.argument("x", shape, "float32")
        bases = function.argument("bases", [reduce.ranks], "int64")
        function.argument("after", list(after[0]), after[1])
        residual = function.argument("residual", reduce.sum_shape, "float32") if reduce.has_residual else None
        weight = function.argument("weight", [reduce.width], "float32") if norm is not None else None
        out = function.argument("out", shape, norm.dtype if norm is not None else "float32")
        total = function.argument("total", reduce.sum_shape, "float32") if keeps_sum else None

        # A kernel that does not use a buffer gets the address of any.
        pointers = [_pointer(x if each is None else each) for each in (x, residual, weight, out, total, bases)]
        # Lines of short operands have a place of their own, so that no number is ever taken for an epoch.
        data = data_offset(slot, reduce.ranks, slot_bytes) + (0 if reduce.is_short else 2 * LL_BYTES)
        kinds = (norm is not None, norm is not None and norm.dtype == "float16", keeps_sum)
        per_thread = ceil(reduce.row / reduce.threads)
        arguments = ", ".join(str(value).lower() for value in (per_thread, rank, reduce.ranks, *kinds))
        with function.body(), launch(reduce.blocks, reduce.threads):
            T.evaluate(
                _call(
                    f"rh_all_reduce_short<{arguments}>"
                    if reduce.is_short
                    else f"rh_all_reduce_long<{arguments}, {str(reduce.has_residual).lower()}>",
                    *pointers,
                    *map(T.int64, (data, slot_bytes, flags_offset(slot, reduce.ranks), state_offset(reduce.ranks))),
                    *map(T.int32, (slot, reduce.count // reduce.lanes, reduce.row)),
                    T.float32(norm.eps if norm is not None else 0.0),
                )
            )
    own = RankReduce(reduce, rank, keeps_sum)
    return function.result.with_attrs({"tirx.is_scheduled": True, ALL_REDUCE: own.to_json()})


def stage_kernel(own: RankReduce, after: tuple[Sequence[int], str]) -> tirx.PrimFunc:
    """Make the kernel that copies a GPU's operand to the memory in which NCCL sums.

    Parameters
    ----------
    own : RankReduce
    after : tuple
        Shape and type of the last kernel's result.

    Returns
    -------
    tirx.PrimFunc
        Function of the operand; the addresses of all GPUs' memory, (ranks,) of int64; the last kernel's result, which
        only orders kernels; the GPU's rows of the residual, if there is one; and a result, (1,) of float32, which
        orders `finish_kernel` after this one.
    """
    reduce = own.reduce
    function = Function(f"stage_{own.rank}", registers="local")
    with function:
        x = function.argument("x", list(reduce.shape), "float32")
        bases = function.argument("bases", [reduce.ranks], "int64")
        function.argument("after", list(after[0]), after[1])
        residual = function.argument("residual", reduce.sum_shape, "float32") if reduce.has_residual else None
        token = function.argument("token", [1], "float32")
        with function.body(), launch(_copy_blocks(reduce), _THREADS):
            pointers = [_pointer(buffer) for buffer in (x, x if residual is None else residual, token, bases)]
            numbers = own.rank, reduce.count // 4, prod(reduce.sum_shape) // 4
            call = f"rh_stage<{str(reduce.has_residual).lower()}>"
            T.evaluate(_call(call, *pointers, *map(T.int32, numbers)))
    return function.result.with_attrs({"tirx.is_scheduled": True})


def finish_kernel(own: RankReduce, number: int, mesh: Sequence[int]) -> tirx.PrimFunc:
    """Make the kernel after NCCL's sum, which writes the results of `all_reduce_kernel`.

    Parameters
    ----------
    own : RankReduce
    number : int
        Number of the sum among the function's collectives.
    mesh : sequence of int
        Indices of the mesh's devices in the manifest.

    Returns
    -------
    tirx.PrimFunc
        Function of the addresses of all GPUs' memory, (ranks,) of int64; the result of `stage_kernel`, which only
        orders kernels; the norm's weight, if there is a norm; and the results.
    """
    reduce = own.reduce
    norm, row = reduce.norm, reduce.width // 4 if reduce.norm is not None else _THREADS
    threads = min(_MAX_THREADS, ceil(row / WARP) * WARP)
    blocks = _copy_blocks(reduce) if norm is None else min(_MAX_COPY_BLOCKS, reduce.count // reduce.width)
    function = Function(f"finish_{own.rank}", registers="local")
    with function:
        bases = function.argument("bases", [reduce.ranks], "int64")
        function.argument("token", [1], "float32")
        weight = function.argument("weight", [reduce.width], "float32") if norm is not None else None
        out = function.argument("out", list(reduce.shape), norm.dtype if norm is not None else "float32")
        total = function.argument("total", reduce.sum_shape, "float32") if own.keeps_sum else None
        with function.body(), launch(blocks, threads):
            pointers = [_pointer(bases if buffer is None else buffer) for buffer in (weight, out, total, bases)]
            kept = prod(reduce.sum_shape) // 4
            begin = 0 if reduce.is_short else own.rank * kept
            kinds = (norm is not None, norm is not None and norm.dtype == "float16", own.keeps_sum)
            call = f"rh_finish<{', '.join(str(kind).lower() for kind in kinds)}>"
            numbers = own.rank, reduce.count // 4, row, begin, begin + kept
            eps = T.float32(norm.eps if norm is not None else 0.0)
            T.evaluate(_call(call, *pointers, *map(T.int32, numbers), eps))
    attributes = {"tirx.is_scheduled": True, ALL_REDUCE: own.to_json(), AFTER_NCCL: [number, own.rank, *mesh]}
    return function.result.with_attrs(attributes)


def _copy_blocks(reduce: AllReduce) -> int:
    return min(_MAX_COPY_BLOCKS, ceil(reduce.count // 4 / _THREADS))


def _pointer(buffer: Any) -> tirx.PrimExpr:
    return T.address_of(buffer[(0,) * len(buffer.shape)])


def _call(function: str, *arguments: tirx.PrimExpr) -> tirx.PrimExpr:
    return T.cuda.func_call(function, *arguments, source_code=_SOURCE, return_type="void")
