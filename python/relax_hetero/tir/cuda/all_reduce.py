"""All-reduce over GPUs that access each other's memory: one kernel a GPU, without a copy and without the host.

Each GPU has memory that the others write to (`artifact.peer_layout`). There are two protocols:

- Short operands: every GPU sends its whole operand, and adds all in the order of the GPUs, so that all get the same
  bits ("one-shot", as in TensorRT-LLM and vLLM). Each eight bytes are stored beside the kernel's epoch, twice, in one
  access of 16 bytes, so that whoever reads the epoch has the data (NCCL's LL). It takes twice the bytes, but neither
  fences nor flags.
- Long operands: GPU r adds the r-th part of the rows, which the others send it, and sends them the result
  ("two-shot": reduce-scatter, then all-gather). A block sends a chunk, sets a flag, and meanwhile adds the chunk before
  and copies the results of the one before that. A flag is a multiple of the epoch plus the number of the chunk.

An RMS norm of the rows, which follows most sums of language models, is a part of both: a row's threads have the whole
row in registers. Long sums then send the norm's result, in half the bytes if it is float16; the sum itself stays where
it was added, and the next long sum adds it there as its residual.

The epoch is the number of a mesh's kernels so far, so that nothing ever is reset. A slot may be written again when no
GPU reads it any more: consecutive kernels use different slots, and when one has ended, all GPUs have ended the one
before it. `slots_of` numbers them so that this holds between calls, too.

Kernels of a program must begin in the same order on all GPUs. Each takes the last one's result as an operand that it
does not read, so that passes keep their order. All blocks of a kernel must be resident at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...artifact.peer_layout import FLAG_BLOCKS, data_offset, epoch_offset
from ..core.builder import Function
from .loops.launch import launch

ALL_REDUCE = "relax_hetero.all_reduce"
"""On a PrimFunc: it exchanges values with the kernels of other devices."""

_THREADS = 512
_MAX_THREADS = 1024
_CHUNKS = 2
_LONG_BLOCKS = 128
_TIMEOUT_SECONDS = 60

_LL_BYTES = 512 << 10
"""Maximum bytes of a short operand: for longer ones, sending twice the bytes takes longer than fences."""

_MAX_LL_PAIRS = 8
_MAX_VECTORS = 4
"""Maximum registers of a thread for a row, in pairs (short operands) and fours (long ones) of numbers."""

_SOURCE = (
    f"""
#define RH_FLAG_BLOCKS {FLAG_BLOCKS}
#define RH_FLAG_STRIDE {_CHUNKS + 2}
#define RH_CHUNKS {_CHUNKS}
#define RH_TIMEOUT_SECONDS {_TIMEOUT_SECONDS}
"""
    + r"""
__device__ __forceinline__ unsigned long long rh_time() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
__device__ __forceinline__ void rh_check_time(unsigned long long begin) {
  if (rh_time() - begin > RH_TIMEOUT_SECONDS * 1000000000ull) __trap();
}
// Memory that the GPUs of a mesh write to, as one kernel uses it.
template <int rank, int ranks> struct rh_Exchange {
  const long long* bases;
  long long data, slot_bytes, epochs;

  __device__ __forceinline__ static int peer(int step) { return (rank + step) % ranks; }
  __device__ __forceinline__ char* slot(int owner, int sender) const {
    return (char*)bases[owner] + data + sender * slot_bytes;
  }
  __device__ __forceinline__ unsigned* state() const { return (unsigned*)((char*)bases[rank] + epochs); }
  __device__ __forceinline__ unsigned begin_epoch() const { return *(const volatile unsigned*)state() + 1; }
  // The last block ends the epoch: then all have read it.
  __device__ __forceinline__ void end_epoch(unsigned now) const {
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(state() + 1, 1u) == gridDim.x - 1) { state()[1] = 0; state()[0] = now; }
  }
  // This block's stores before are visible to the same blocks of the other GPUs once they have waited for the flag.
  __device__ __forceinline__ void signal(unsigned flag) const {
    __syncthreads();
    if (threadIdx.x < ranks && threadIdx.x != rank) {
      unsigned* theirs = (unsigned*)bases[threadIdx.x] + rank * RH_FLAG_BLOCKS + blockIdx.x;
      asm volatile("fence.acq_rel.sys; st.release.sys.global.u32 [%0], %1;" :: "l"(theirs), "r"(flag) : "memory");
    }
  }
  __device__ __forceinline__ void wait(unsigned flag) const {
    if (threadIdx.x < ranks && threadIdx.x != rank) {
      unsigned* mine = (unsigned*)bases[rank] + threadIdx.x * RH_FLAG_BLOCKS + blockIdx.x;
      unsigned seen;
      unsigned long long begin = rh_time();
      do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
        rh_check_time(begin);
      } while ((int)(seen - flag) < 0);
    }
    __syncthreads();
  }
};

__device__ __forceinline__ float4 rh_add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float rh_squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
__device__ __forceinline__ unsigned rh_to_half(float2 v) {
  unsigned h;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(v.y), "f"(v.x));
  return h;
}
// Sum over the threads of a block, which all get.
__device__ __forceinline__ float rh_block_sum(float value) {
  __shared__ float partial[32];
  for (int lanes = 16; lanes; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  __syncthreads();  // the last sum has been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) total += partial[warp];
  return total;
}
template <bool HALF> __device__ __forceinline__ void rh_store(void* out, long long i, float4 v) {
  if (HALF) ((uint2*)out)[i] = make_uint2(rh_to_half(make_float2(v.x, v.y)), rh_to_half(make_float2(v.z, v.w)));
  else ((float4*)out)[i] = v;
}
template <bool HALF> __device__ __forceinline__ void rh_store(void* out, long long i, float2 v) {
  if (HALF) ((unsigned*)out)[i] = rh_to_half(v); else ((float2*)out)[i] = v;
}

// Short operands. A line has eight bytes and, twice, the epoch.
template <int PAIRS, int RANK, int RANKS, bool NORM, bool HALF, bool SUM>
__device__ __forceinline__ void rh_all_reduce_short(
    const float* x, const float*, const float* weight, void* out, float* sum, const void* bases, long long data,
    long long slot_bytes, long long epochs, int pairs, int row, float eps) {
  rh_Exchange<RANK, RANKS> ex{(const long long*)bases, data, slot_bytes, epochs};
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
    float2 total[PAIRS];
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) total[p] = make_float2(0.0f, 0.0f);
    for (int other = 0; other < RANKS; ++other) {
      unsigned a[PAIRS], b[PAIRS], spins = 0;
      unsigned long long start = 0;
      bool waits;
      do {  // all lines are in flight together
        waits = false;
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
          int i = begin + threadIdx.x + p * blockDim.x;
          a[p] = b[p] = 0;
          if (i < end) {
            if (other == RANK) {
              uint2 v = ((const uint2*)x)[i];
              a[p] = v.x; b[p] = v.y;
            } else {
              unsigned flag, flag2;
              asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                           : "=r"(a[p]), "=r"(flag), "=r"(b[p]), "=r"(flag2)
                           : "l"(ex.slot(RANK, other) + 16ll * i));
              waits |= flag != now || flag2 != now;
            }
          }
        }
        if (waits && ++spins % 65536 == 0) { if (!start) start = rh_time(); else rh_check_time(start); }
      } while (waits);
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        total[p].x += __uint_as_float(a[p]);
        total[p].y += __uint_as_float(b[p]);
      }
    }
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      int i = begin + threadIdx.x + p * blockDim.x;
      if (SUM && i < end) ((float2*)sum)[i] = total[p];
      squares += total[p].x * total[p].x + total[p].y * total[p].y;
    }
    float inverse = NORM ? rsqrtf(rh_block_sum(squares) / (2 * row) + eps) : 1.0f;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      int i = begin + threadIdx.x + p * blockDim.x;
      if (i >= end) continue;
      float2 v = total[p];
      if (NORM) {
        float2 w = ((const float2*)weight)[i - begin];
        v = make_float2(v.x * inverse * w.x, v.y * inverse * w.y);
      }
      rh_store<HALF>(out, i, v);
    }
  }
  ex.end_epoch(now);
}

template <int UNROLL, class Vector>
__device__ __forceinline__ void rh_copy(const Vector* from, Vector* to, int begin, int end) {
  for (int i = begin + threadIdx.x; i < end; i += UNROLL * blockDim.x) {
    Vector v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) if (i + u * blockDim.x < end) v[u] = __ldcg(from + i + u * blockDim.x);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) if (i + u * blockDim.x < end) to[i + u * blockDim.x] = v[u];
  }
}

// Long operands: GPU r adds part r, which the others send it, and sends them the result.
template <int VECTORS, int RANK, int RANKS, bool NORM, bool HALF, bool SUM, bool RESIDUAL>
__device__ __forceinline__ void rh_all_reduce_long(
    const float* x, const float* residual, const float* weight, void* out, float* sum, const void* bases,
    long long data, long long slot_bytes, long long epochs, int vectors, int row, float eps) {
  rh_Exchange<RANK, RANKS> ex{(const long long*)bases, data, slot_bytes, epochs};
  unsigned now = ex.begin_epoch();
  int rows = (vectors + row - 1) / row, part_rows = (rows + RANKS - 1) / RANKS;
  int part = part_rows * row, pieces = gridDim.x * RH_CHUNKS, piece = (part_rows + pieces - 1) / pieces * row;
  const float4* own = (const float4*)x + (long long)RANK * part;
  long long results = 16ll * part;  // in a slot, behind the operand's part
  for (int number = 0; number < RH_CHUNKS + 2; ++number) {
    if (number < RH_CHUNKS) {
      int begin = (number * gridDim.x + blockIdx.x) * piece;
      for (int step = 1; step < RANKS; ++step) {
        int peer = ex.peer(step), end = min(min(begin + piece, part), vectors - peer * part);
        rh_copy<4>((const float4*)x + (long long)peer * part, (float4*)ex.slot(peer, RANK), begin, end);
      }
    }
    if (number) ex.wait(now * RH_FLAG_STRIDE + number - 1);
    if (number && number <= RH_CHUNKS) {
      int first = ((number - 1) * gridDim.x + blockIdx.x) * piece;
      int last = min(min(first + piece, part), vectors - RANK * part);
      for (int begin = first; begin < last; begin += row) {
        int end = min(begin + row, last);
        float4 total[VECTORS];
        float squares = 0.0f;
#pragma unroll
        for (int u = 0; u < VECTORS; ++u) {
          int i = begin + threadIdx.x + u * blockDim.x;
          total[u] = RESIDUAL && i < end ? ((const float4*)residual)[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        for (int other = 0; other < RANKS; ++other) {
          const float4* from = other == RANK ? own : (const float4*)ex.slot(RANK, other);
#pragma unroll
          for (int u = 0; u < VECTORS; ++u) {
            int i = begin + threadIdx.x + u * blockDim.x;
            if (i < end) total[u] = rh_add(total[u], __ldcg(from + i));
          }
        }
#pragma unroll
        for (int u = 0; u < VECTORS; ++u) {
          int i = begin + threadIdx.x + u * blockDim.x;
          if (SUM && i < end) ((float4*)sum)[i] = total[u];
          squares += rh_squares(total[u]);
        }
        float inverse = NORM ? rsqrtf(rh_block_sum(squares) / (4 * row) + eps) : 1.0f;
#pragma unroll
        for (int u = 0; u < VECTORS; ++u) {
          int i = begin + threadIdx.x + u * blockDim.x;
          if (i >= end) continue;
          float4 v = total[u];
          if (NORM) {
            float4 w = ((const float4*)weight)[i - begin];
            v = make_float4(v.x * inverse * w.x, v.y * inverse * w.y, v.z * inverse * w.z, v.w * inverse * w.w);
          }
          rh_store<HALF>(out, (long long)RANK * part + i, v);
          for (int step = 1; step < RANKS; ++step) rh_store<HALF>(ex.slot(ex.peer(step), RANK) + results, i, v);
        }
      }
    }
    if (number >= 2) {
      int begin = ((number - 2) * gridDim.x + blockIdx.x) * piece;
      for (int other = 0; other < RANKS; ++other) {
        if (other == RANK) continue;
        int end = min(min(begin + piece, part), vectors - other * part);
        const char* from = ex.slot(RANK, other) + results;
        if (HALF) rh_copy<4>((const uint2*)from, (uint2*)out + (long long)other * part, begin, end);
        else rh_copy<4>((const float4*)from, (float4*)out + (long long)other * part, begin, end);
      }
    }
    if (number <= RH_CHUNKS) ex.signal(now * RH_FLAG_STRIDE + number);
  }
  ex.end_epoch(now);
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
        Whether each GPU adds its part of a residual to its part of the rows; only for long operands.
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
        """Whether every GPU adds all; else each adds its part of the rows."""
        return 4 * self.count <= _LL_BYTES

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
        """Whether a norm can be a part of it, and a residual if it is long."""
        fits = self.width % 4 == 0 and self.width <= self.lanes * self._max_units * _MAX_THREADS
        return fits and (self.is_short or self.count // self.width % self.ranks == 0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that it needs for each GPU."""
        return 2 * _LL_BYTES + (0 if self.is_short else 2 * 16 * self._part_vectors)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _THREADS if self.row <= self._max_units * _THREADS else _MAX_THREADS

    @property
    def row(self) -> int:
        """Pairs (short operands) or fours of numbers that a block adds at a time: a row, if there are rows."""
        if self.norm is not None or self.has_residual:
            return self.width // self.lanes
        units = self.count // self.lanes
        if self.is_short:
            return ceil(units / max(1, min(FLAG_BLOCKS, units // _THREADS)))
        return min(_MAX_VECTORS * _THREADS, ceil(units / (self.ranks * _LONG_BLOCKS * _CHUNKS)))

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
        Whether there is a second result, the sum, beside that of the norm.

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

        def pointer(buffer: Any) -> tirx.PrimExpr:
            """Address of a buffer; of any for one that the kernel does not use."""
            buffer = x if buffer is None else buffer
            return T.address_of(buffer[(0,) * len(buffer.shape)])

        # Lines of short operands have a place of their own, so that no number is ever taken for an epoch.
        data = data_offset(slot, reduce.ranks, slot_bytes) + (0 if reduce.is_short else 2 * _LL_BYTES)
        flags = (norm is not None, norm is not None and norm.dtype == "float16", keeps_sum)
        per_thread = ceil(reduce.row / reduce.threads)
        arguments = ", ".join(str(value).lower() for value in (per_thread, rank, reduce.ranks, *flags))
        with function.body(), launch(reduce.blocks, reduce.threads):
            T.evaluate(
                T.cuda.func_call(
                    f"rh_all_reduce_short<{arguments}>"
                    if reduce.is_short
                    else f"rh_all_reduce_long<{arguments}, {str(reduce.has_residual).lower()}>",
                    *map(pointer, (x, residual, weight, out, total, bases)),
                    *(T.int64(number) for number in (data, slot_bytes, epoch_offset(reduce.ranks))),
                    *(T.int32(number) for number in (reduce.count // reduce.lanes, reduce.row)),
                    T.float32(norm.eps if norm is not None else 0.0),
                    source_code=_SOURCE,
                    return_type="void",
                )
            )
    return function.result.with_attrs({"tirx.is_scheduled": True, ALL_REDUCE: f"{rank} of {reduce.ranks}"})
