"""All-reduce over GPUs that access each other's memory: one kernel a GPU, without a copy and without the host.

Each GPU has memory that the others write to (`artifact.peer_layout`). There are two protocols:

- Short operands: every GPU sends its whole operand, and adds all in the order of the GPUs, so that all get the same
  bits ("one-shot", as in TensorRT-LLM and vLLM). There are neither fences nor flags, but the data alone: a word that is
  +0.0 is not there yet (the Lamport protocol, as in TensorRT-LLM and FlashInfer). -0.0 is sent for +0.0, all other bits
  as they are. Whoever reads a word puts the zero back. The product's kernel before may send, too (`send_words`).
- Long operands: GPU r adds the r-th part of the rows, which the others send it, and writes the result to theirs, too
  ("two-shot": reduce-scatter, then all-gather). A block that has sent its rows, or results, sets a flag, for which the
  same block of the other GPU waits. Each GPU sends the address of its result to the others when its kernel begins,
  which ends when all have written: nothing else uses this memory meanwhile. The kernel of the product before may send
  the rows instead, in tiles with flags of their own (`send_tile`).

An RMS norm or a layer norm of the rows, which follow most sums of transformers, is a part of both: a row's threads have
the whole row in registers. Long sums then send the norm's result; the sum itself stays where it was added, and the next
long sum adds it there as its residual. If the result is float16, as the operands of the next products, so are the rows
that are sent, each times a power of two, so that they cannot overflow.

A slot may be written again when no GPU reads it any more: consecutive kernels use different slots, and when one has
ended, all GPUs have ended the one before it. `slots_of` numbers them so that this holds between calls, too.

The epoch of a slot is the number of kernels that used it, so that no flag ever is reset. Each kernel ends the epoch of
the one before it, which no block reads any more.

Words arrive at zeros. A GPU sends those of sum n after its sum n - 1 has ended, and so after all GPUs have ended sum
n - 2 and all before it, one of which was the last to use the slot. Each GPU's kernel waits for all words that are sent
to it, whatever the operand's size, and clears them before it ends. So the places of words in a slot that is free are
zero, as in new memory, also between functions with other operands, and long operands have a place of their own. Calls
that end halfway may leave words behind, for which `vm.device.peer_memory` clears the memory; a kernel that traps ends
the CUDA context, and with it the memory.

The product before a short sum may send each vector when it stores it (`send_words`). It begins to store when sum n - 1
has ended on its GPU, as a kernel of sum n that sends does.

The product before a long sum may send the rows (`send_tile`), while it computes others: each tile as float16, a power
of two for each row of it, then, for each 32 rows, a flag with the sum's epoch. The product begins when the last sum has
ended on its GPU. So no GPU reads the slot any more, and the epoch of the slot's last use has ended: the product reads
the epoch that the sum will have. The sum's blocks send results only; each waits for the flags of its rows. Flags of
tiles have places of their own and only ever rise, as epochs do; those of blocks are twice the epoch for operands, and
one more for results.

It does not help to move more of what long sums send into products: stores to another GPU seem to hold up the loads of
their multiprocessor. Two H200s that share layers of a Llama 3 8B, in prefills of 2,048 rows (differences of kernels'
ends, by torch.profiler), took:

- 20 to 24 us for most sums, not 33 to 39, where two warps of each block of the next product sent the rows of the result
  that their GPU has added, while it computed the tiles of these, and then waited for the others; but 224 to 230 us, not
  206 to 212, for that product of 2048 x 7168 x 4096, and 98 to 101 us, not 72 to 73, for one of 2048 x 3072 x 4096.
  Threads with 4 and with 10 vectors in flight took the same.
- As long as before where the sum's kernel sent the rows, and only the wait moved to the next product.
- 69 to 75 us, not 56 to 58, for a product of 2048 x 4096 x 2048 that stored tiles at the other GPU, from its
  accumulators; 62 us where it stored them as float16 on its own GPU, and two warps copied them. Without sending, it
  would take 50 us.

Nothing waits in a circle: kernels of products wait for no GPU, and a kernel of a sum sends its address and its
operand before it waits for those of others, and sends its results before it waits for results. So when sum n - 1 has
ended on a GPU, all others have begun it, get what they wait for, end it, and begin sum n. This needs kernels of a
program to begin in the same order on all GPUs, copies between them to be before or after all kernels of a sum
(`transform.record.command_regions`), and all blocks of a kernel to be resident at once. Each kernel takes the last
one's result as an operand that it does not read, so that passes keep their order. A thread that waits for a minute
traps, as after an error on another GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...artifact.peer_layout import (
    FLAG_BLOCKS,
    LAMPORT_BYTES,
    LONG_OPERANDS,
    RESULT_LINE_BYTES,
    SENT_FLAGS_BYTES,
    data_offset,
    flags_offset,
    state_offset,
)
from ...encoding.problem import SentSum
from ...target.gpu_target import NVLINK_BYTES_PER_SECOND, WARP
from ..core.builder import Function, int64
from .core.launch import WAIT, enable_pdl
from .loops.launch import launch

ALL_REDUCE = "relax_hetero.all_reduce"
"""On a PrimFunc: it exchanges values with the kernels of other devices; JSON of a `RankReduce`."""

_THREADS = 512
_MAX_THREADS = 1024
_LONG_BLOCKS = 128
_TIMEOUT_SECONDS = 60

_ROW_THREADS = (WARP, 128, 256, 512, _MAX_THREADS)
"""Threads of a row of long operands: those that share a row have a named barrier, of which there are 15."""

_SHORTEST_SECONDS = 2.5e-6
"""Time of the shortest all-reduce in a graph (`apps/bench/collectives.py`, two H200s)."""
_FLAG_SECONDS = 4.6e-6
"""Time by which the flags of a long one exceed that: 8 MB and 32 MB took 30.6 and 102 us there, so that bytes take 24
us of 8 MB, and 6.8 us are left, where 16 KB took 2.2."""

_MAX_VECTORS = 4
"""Maximum registers of a thread for a row, in fours of numbers."""
_AHEAD_VECTORS = 2
"""Maximum fours of numbers for which a thread has registers to load the next row ahead."""
_SHORT_VECTORS = 2
"""Fours of numbers of a thread for a row of a short operand, if it has enough threads."""

SENT_TILE = (128, 256)
"""Rows and columns of the tiles that a product's kernel sends."""
_SENT_ROWS = 32
"""Rows of a tile that a warp sends at a time, with a flag."""
_SENT_TOGETHER = 2
"""Rows that a warp sends while the next ones are loaded."""

SOURCE = (
    f"""
#ifndef RH_ALL_REDUCE
#define RH_ALL_REDUCE
#define RH_FLAG_BLOCKS {FLAG_BLOCKS}
#define RH_TIMEOUT_SECONDS {_TIMEOUT_SECONDS}
#define RH_SENT_ROWS {_SENT_ROWS}
#define RH_TILE_ROWS {SENT_TILE[0]}
#define RH_SENT_COLUMNS {SENT_TILE[1]}
#define RH_SENT_FLAGS_BYTES {SENT_FLAGS_BYTES}
#define RH_RESULT_LINE_BYTES {RESULT_LINE_BYTES}
#define RH_AHEAD_VECTORS {_AHEAD_VECTORS}
#define RH_SENT_TOGETHER {_SENT_TOGETHER}
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
  // Epoch of the slot.
  __device__ __forceinline__ unsigned epoch() const {
    return *(const volatile unsigned*)((char*)bases[RANK] + state + 4 * (1 + number)) + 1;
  }
  // The slot of the kernel before, plus one; this kernel, which does not read its epoch, ends it.
  __device__ __forceinline__ unsigned last_slot() const {
    return *(const volatile unsigned*)((char*)bases[RANK] + state);
  }
  __device__ __forceinline__ void end_epoch(unsigned last) const {
    unsigned* words = (unsigned*)((char*)bases[RANK] + state);
    if (blockIdx.x || threadIdx.x) return;
    if (last) atomicAdd(words + last, 1u);
    words[0] = number + 1;
  }
  __device__ __forceinline__ unsigned begin_epoch() const {
    end_epoch(last_slot());
    return epoch();
  }
  __device__ __forceinline__ unsigned* flag(int owner, int sender) const {
    return (unsigned*)((char*)bases[owner] + flags) + sender * RH_FLAG_BLOCKS + blockIdx.x;
  }
  // Flags of the tiles that a GPU has sent, which are before the operand: for each 32 rows one of each 256 columns.
  __device__ __forceinline__ unsigned* tile_flags(int owner, int sender) const {
    return (unsigned*)(slot(owner, sender) - RH_SENT_FLAGS_BYTES);
  }
  // Line with the address of another GPU's result: the halves of the address, each followed by the epoch.
  __device__ __forceinline__ long long line(int owner, int sender) const {
    return (long long)slot(owner, sender) - RH_SENT_FLAGS_BYTES - RH_RESULT_LINE_BYTES;
  }
  __device__ __forceinline__ void send_address(int peer, const void* result, unsigned now) const {
    unsigned low = (unsigned)(size_t)result, high = (unsigned)((size_t)result >> 32);
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(line(peer, RANK)), "r"(low), "r"(now), "r"(high), "r"(now));
  }
  // Address of the result of another GPU, whose kernel has begun, so that nothing else uses this memory.
  __device__ __forceinline__ size_t wait_for_address(int peer, unsigned now) const {
    unsigned low, high, flag, flag2;
    unsigned long long begin = rh_time();
    do {
      asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(low), "=r"(flag), "=r"(high), "=r"(flag2) : "l"(line(RANK, peer)));
      rh_check_time(begin);
    } while (flag != now || flag2 != now);
    return (size_t)high << 32 | low;
  }
  __device__ __forceinline__ static void set(unsigned* flag, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
  }
  __device__ __forceinline__ static void wait_for(const unsigned* flag, unsigned value) {
    unsigned seen;
    unsigned long long begin = rh_time();
    do {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
      rh_check_time(begin);
    } while ((int)(seen - value) < 0);
  }
  // What the block has stored is visible to the same block of other GPUs that has waited for the flag.
  __device__ __forceinline__ void signal(unsigned value) const {
    __syncthreads();
    if (threadIdx.x < RANKS && threadIdx.x != RANK) set(flag(threadIdx.x, RANK), value);
  }
  __device__ __forceinline__ void wait(unsigned value) const {
    if (threadIdx.x < RANKS && threadIdx.x != RANK) wait_for(flag(RANK, threadIdx.x), value);
    __syncthreads();
  }
  // The same for the tiles of rows from `first` to `last`, with `columns` of them beside each other.
  __device__ __forceinline__ void wait_for_tiles(int first, int last, int columns, unsigned value) const {
    int begin = first / RH_SENT_ROWS * columns, end = ((last + RH_SENT_ROWS - 1) / RH_SENT_ROWS) * columns;
    for (int step = 1; step < RANKS; ++step) {
      for (int i = begin + threadIdx.x; i < end; i += blockDim.x) wait_for(tile_flags(RANK, peer(step)) + i, value);
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
__device__ __forceinline__ uint2 rh_to_halves(float4 v) {
  return make_uint2(rh_to_half(v.x, v.y), rh_to_half(v.z, v.w));
}
template <bool HALF> __device__ __forceinline__ void rh_store(void* out, long long i, float4 v) {
  if (HALF) ((uint2*)out)[i] = rh_to_halves(v);
  else ((float4*)out)[i] = v;
}
template <bool HALF> __device__ __forceinline__ float4 rh_load(const void* from, long long i) {
  if (!HALF) return __ldcg((const float4*)from + i);
  uint2 h = __ldcg((const uint2*)from + i);
  float2 a = rh_from_half(h.x), b = rh_from_half(h.y);
  return make_float4(a.x, a.y, b.x, b.y);
}
__device__ __forceinline__ void rh_team_barrier(int team, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(team + 1), "r"(threads) : "memory");
}
// Sum, or maximum, over the threads of a team, which all get: a block, a warp, or one of up to 15 groups of warps.
template <bool MAX> __device__ __forceinline__ float rh_reduce(float value, int threads) {
  __shared__ float partial[32];
  for (int lanes = 16; lanes; lanes /= 2) {
    float other = __shfl_xor_sync(~0u, value, lanes);
    value = MAX ? fmaxf(value, other) : value + other;
  }
  if (threads == 32) return value;
  int team = threadIdx.x / threads, first = team * threads / 32, end = first + threads / 32;
  rh_team_barrier(team, threads);  // the last result has been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  rh_team_barrier(team, threads);
  value = partial[first];
  for (int warp = first + 1; warp < end; ++warp) value = MAX ? fmaxf(value, partial[warp]) : value + partial[warp];
  return value;
}

// Norms of rows.
#define RH_NO_NORM 0
#define RH_RMS_NORM 1
#define RH_LAYER_NORM 2

// The numbers of a row that a thread has, 0 beyond the row.
template <int VECTORS, int THREADS> __device__ __forceinline__ void rh_load_numbers(
    const void* from, float4* v, int first, int end) {
#pragma unroll
  for (int u = 0; u < VECTORS; ++u) {
    int i = first + threadIdx.x + u * THREADS;
    v[u] = i < end ? __ldcg((const float4*)from + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}
template <int VECTORS, int THREADS, bool HALF> __device__ __forceinline__ void rh_store_row(
    void* out, const float4* v, int first, int end) {
#pragma unroll
  for (int u = 0; u < VECTORS; ++u) {
    int i = first + threadIdx.x + u * THREADS;
    if (i < end) rh_store<HALF>(out, i, v[u]);
  }
}
// The norm of a row, in place; `weight` and `bias` are the numbers of the same columns.
template <int VECTORS, int THREADS, int NORM> __device__ __forceinline__ void rh_norm(
    float4* v, const float4* weight, const float4* bias, int row, float eps) {
  float mean = 0.0f, squares = 0.0f;
  if (NORM == RH_LAYER_NORM) {
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) mean += v[u].x + v[u].y + v[u].z + v[u].w;  // 0 beyond the row
    mean = rh_reduce<false>(mean, THREADS) / (4 * row);
  }
#pragma unroll
  for (int u = 0; u < VECTORS; ++u) {
    if (threadIdx.x + u * THREADS >= row) continue;
    v[u] = rh_add(v[u], make_float4(-mean, -mean, -mean, -mean));
    squares += v[u].x * v[u].x + v[u].y * v[u].y + v[u].z * v[u].z + v[u].w * v[u].w;
  }
  float inverse = rsqrtf(rh_reduce<false>(squares, THREADS) / (4 * row) + eps);
#pragma unroll
  for (int u = 0; u < VECTORS; ++u) {
    v[u] = rh_scale(v[u], inverse);
    v[u] = make_float4(v[u].x * weight[u].x, v[u].y * weight[u].y, v[u].z * weight[u].z, v[u].w * weight[u].w);
    if (NORM == RH_LAYER_NORM) v[u] = rh_add(v[u], bias[u]);
  }
}

// Short operands: -0.0 is sent for +0.0, which says that a word is not there yet.
__device__ __forceinline__ unsigned rh_word(float value) {
  unsigned bits = __float_as_uint(value);
  return bits ? bits : 0x80000000u;
}
__device__ __forceinline__ void rh_store_words(long long slot, int i, unsigned x, unsigned y, unsigned z, unsigned w) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(slot + 16ll * i), "r"(x), "r"(y), "r"(z), "r"(w));
}
__device__ __forceinline__ void rh_send_words(long long slot, int i, float x, float y, float z, float w) {
  rh_store_words(slot, i, rh_word(x), rh_word(y), rh_word(z), rh_word(w));
}
// Every GPU sends its operand to all others (SENT: products before have sent it), and adds the words that arrive in the
// order of the GPUs. `scale` and `shift` are a thread's numbers of the norm's weight and bias.
template <int VECTORS, int THREADS, int RANK, int RANKS, int NORM, bool HALF, bool SUM, bool SENT, class... Base>
__device__ __forceinline__ void rh_all_reduce_short(
    const void* x, void* out, void* sum, const float4* scale, const float4* shift, long long data, long long slot_bytes,
    long long state, int number, int vectors, int row, float eps, Base... base) {
  const long long bases[RANKS] = {base...};
  rh_Exchange<RANK, RANKS> ex{bases, data, slot_bytes, 0, state, number};
  constexpr int TOGETHER = VECTORS * RANKS <= 8 ? RANKS : 1;  // GPUs whose words are in flight together
  unsigned last = ex.last_slot();
  for (int first = blockIdx.x * row; first < vectors && !SENT; first += gridDim.x * row) {
    int end = min(first + row, vectors);
    float4 v[VECTORS];
    rh_load_numbers<VECTORS, THREADS>(x, v, first, end);
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int i = first + threadIdx.x + u * THREADS;
#pragma unroll
      for (int step = 1; step < RANKS && i < end; ++step) {
        rh_send_words((long long)ex.slot(ex.peer(step), RANK), i, v[u].x, v[u].y, v[u].z, v[u].w);
      }
    }
  }
  for (int first = blockIdx.x * row; first < vectors; first += gridDim.x * row) {
    int end = min(first + row, vectors);
    float4 own[VECTORS], total[VECTORS];
    rh_load_numbers<VECTORS, THREADS>(x, own, first, end);
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) total[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int from = 0; from < RANKS; from += TOGETHER) {
      unsigned words[TOGETHER][VECTORS][4], spins = 0;
      unsigned long long start = 0;
      bool waits = true;
      while (waits) {
        unsigned smallest = 1;
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r) {
#pragma unroll
          for (int u = 0; u < VECTORS && from + r != RANK; ++u) {
            int i = first + threadIdx.x + u * THREADS;
            unsigned* v = words[r][u];
            if (i >= end) continue;
            asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                         : "l"((long long)ex.slot(RANK, from + r) + 16ll * i));
            smallest = min(min(min(v[0], v[1]), min(v[2], v[3])), smallest);
          }
        }
        waits = smallest == 0;
        if (waits && ++spins % 65536 == 0) { if (!start) start = rh_time(); else rh_check_time(start); }
      }
#pragma unroll
      for (int r = 0; r < TOGETHER; ++r) {
#pragma unroll
        for (int u = 0; u < VECTORS; ++u) {
          int i = first + threadIdx.x + u * THREADS;
          unsigned* v = words[r][u];
          if (from + r == RANK) {
            total[u] = rh_add(total[u], own[u]);
          } else if (i < end) {
            total[u] = rh_add(total[u], make_float4(__uint_as_float(v[0]), __uint_as_float(v[1]),
                                                    __uint_as_float(v[2]), __uint_as_float(v[3])));
            rh_store_words((long long)ex.slot(RANK, from + r), i, 0, 0, 0, 0);
          }
        }
      }
    }
    if (SUM) rh_store_row<VECTORS, THREADS, false>(sum, total, first, end);
    if (NORM) rh_norm<VECTORS, THREADS, NORM>(total, scale, shift, row, eps);
    rh_store_row<VECTORS, THREADS, HALF>(out, total, first, end);
  }
  ex.end_epoch(last);
}

__device__ __forceinline__ void rh_copy(const float4* from, float4* to, int begin, int end) {
  for (int i = begin + threadIdx.x; i < end; i += 4 * blockDim.x) {
    float4 v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) if (i + u * blockDim.x < end) v[u] = __ldcg(from + i + u * blockDim.x);
#pragma unroll
    for (int u = 0; u < 4; ++u) if (i + u * blockDim.x < end) to[i + u * blockDim.x] = v[u];
  }
}
// Power of two that makes the largest number of a row 2^14 or more as float16.
__device__ __forceinline__ float rh_scale_of(float largest) {
  int exponent = max((int)(__float_as_uint(largest) >> 23), 30) - 127;  // within float32, inverted
  return __uint_as_float((unsigned)(127 + 14 - exponent) << 23);
}
__device__ __forceinline__ float rh_largest(float largest, float4 v) {
  return fmaxf(fmaxf(largest, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
}
// A lane's eight numbers of each of some rows of a tile: those from 4 * lane and from 128 + 4 * lane on.
template <int ROWS> struct rh_SentRows {
  float4 v[ROWS][2];
  __device__ __forceinline__ void load(const float4* from, int vectors) {
#pragma unroll
    for (int u = 0; u < ROWS; ++u) {
      v[u][0] = __ldcg(from + u * vectors);
      v[u][1] = __ldcg(from + u * vectors + 32);
    }
  }
  // Store them, each row times a power of two. Returns the inverse of row `lane - first`, else `inverse`.
  __device__ __forceinline__ float send(char* to, int vectors, int lane, int first, float inverse) const {
    float largest[ROWS];
#pragma unroll
    for (int u = 0; u < ROWS; ++u) largest[u] = rh_largest(rh_largest(0.0f, v[u][0]), v[u][1]);
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) {
#pragma unroll
      for (int u = 0; u < ROWS; ++u) largest[u] = fmaxf(largest[u], __shfl_xor_sync(~0u, largest[u], lanes));
    }
#pragma unroll
    for (int u = 0; u < ROWS; ++u) {
      float scale = rh_scale_of(largest[u]);
      uint2 low = rh_to_halves(rh_scale(v[u][0], scale)), high = rh_to_halves(rh_scale(v[u][1], scale));
      // Of two lanes, the even one stores the low halves of both, the odd one the high ones.
      bool odd = lane % 2;
      unsigned x = __shfl_xor_sync(~0u, odd ? low.x : high.x, 1), y = __shfl_xor_sync(~0u, odd ? low.y : high.y, 1);
      ((uint4*)(to + 8ll * u * vectors))[0] = odd ? make_uint4(x, y, high.x, high.y) : make_uint4(low.x, low.y, x, y);
      if (lane == first + u) inverse = 1.0f / scale;
    }
    return inverse;
  }
};
// Two warps of the kernel of a product send a tile, which the block has stored, to the GPU that adds it: each row as
// float16 times a power of two, of whose inverses each column of tiles has an array. While some rows are sent, the next
// ones are loaded.
template <int RANK, int RANKS> __device__ __forceinline__ void rh_send_tile(
    const void* x, const void* bases, long long data, long long slot_bytes, long long state, int number, int part_rows,
    int width, int row, int column) {
  rh_Exchange<RANK, RANKS> ex{(const long long*)bases, data, slot_bytes, 0, state, number};
  constexpr int ROWS = RH_SENT_TOGETHER, WARP_ROWS = RH_TILE_ROWS / 2;
  int peer = row / part_rows, lane = threadIdx.x % 32, vectors = width / 4, tile = column / RH_SENT_COLUMNS;
  if (peer == RANK) return;
  char* slot = ex.slot(peer, RANK);
  int skip = threadIdx.x / 32 % 2 * WARP_ROWS, first = row % part_rows + skip;
  const float4* from = (const float4*)x + (long long)(row + skip) * vectors + column / 4 + lane;
  char* to = slot + 8 * ((long long)first * vectors + column / 4 + lane / 2 * 2 + lane % 2 * 32);
  float* inverses = (float*)(slot + 8ll * part_rows * vectors) + tile * part_rows + first + lane;
  rh_SentRows<ROWS> even, odd;
  even.load(from, vectors);
#pragma unroll 1
  for (int begin = 0; begin < WARP_ROWS; begin += RH_SENT_ROWS) {
    float inverse = 1.0f;
#pragma unroll 1
    for (int r = 0; r < RH_SENT_ROWS; r += 2 * ROWS) {
      odd.load(from += ROWS * vectors, vectors);
      inverse = even.send(to, vectors, lane, r, inverse);
      to += 8ll * ROWS * vectors;
      from += ROWS * vectors;
      if (begin + r + 2 * ROWS < WARP_ROWS) even.load(from, vectors);
      inverse = odd.send(to, vectors, lane, r + ROWS, inverse);
      to += 8ll * ROWS * vectors;
    }
    inverses[begin] = inverse;
  }
  __syncwarp();
  if (lane < WARP_ROWS / RH_SENT_ROWS) {
    int flag = (first / RH_SENT_ROWS + lane) * (width / RH_SENT_COLUMNS) + tile;
    ex.set(ex.tile_flags(peer, RANK) + flag, ex.epoch());
  }
}
// Rows as float16, each times a power of two that makes its largest number 2^14 or more, and the inverses of these.
template <int VECTORS, int THREADS> __device__ __forceinline__ void rh_send_rows(
    const float4* from, uint2* to, float* inverses, int begin, int end, int row) {
  int thread = threadIdx.x % THREADS, teams = blockDim.x / THREADS;
  for (begin += threadIdx.x / THREADS * row; begin < end; begin += teams * row) {
    float4 v[VECTORS];
    float largest = 0.0f;
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int i = thread + u * THREADS;
      v[u] = i < row ? __ldcg(from + begin + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) largest = rh_largest(largest, v[u]);
    float scale = rh_scale_of(rh_reduce<true>(largest, THREADS));
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int i = thread + u * THREADS;
      if (i < row) rh_store<true>(to, begin + i, rh_scale(v[u], scale));
    }
    if (thread == 0) inverses[begin / row] = 1.0f / scale;
  }
}
// A thread's numbers of a row that a GPU has itself, and of its residual.
template <int VECTORS, int THREADS, bool RESIDUAL> struct rh_OwnRow {
  float4 x[VECTORS], residual[VECTORS];
  __device__ __forceinline__ void load(const float4* from, const float4* old, int first, int end) {
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int i = first + threadIdx.x % THREADS + u * THREADS;
      x[u] = i < end ? __ldcg(from + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (RESIDUAL) residual[u] = i < end ? __ldcg(old + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
};
// Long operands: GPU r adds part r, which the others send it (SENT: which kernels before have sent in tiles), and sends
// them the result. Teams of THREADS threads have a row each, so that many rows of a block are in flight.
template <int VECTORS, int THREADS, int RANK, int RANKS, int NORM, bool HALF, bool SUM, bool RESIDUAL, bool SENT>
__device__ __forceinline__ void rh_all_reduce_long(
    const float* x, const float* residual, const float* weight, const float* bias, void* out, float* sum,
    const void* bases, long long data, long long slot_bytes, long long flags, long long state, int number, int vectors,
    int row, float eps) {
  rh_Exchange<RANK, RANKS> ex{(const long long*)bases, data, slot_bytes, flags, state, number};
  unsigned now = ex.begin_epoch();
  int rows = (vectors + row - 1) / row, part_rows = (rows + RANKS - 1) / RANKS, part = part_rows * row;
  int piece = (part_rows + gridDim.x - 1) / gridDim.x * row, begin = blockIdx.x * piece;
  long long inverses = 8ll * part;  // offset in a slot, after the operand's part as float16
  __shared__ size_t results[RANKS];
  if (threadIdx.x < RANKS && threadIdx.x != RANK && blockIdx.x == 0) ex.send_address(threadIdx.x, out, now);
  for (int step = 1; step < RANKS && !SENT; ++step) {
    int peer = ex.peer(step), end = min(min(begin + piece, part), vectors - peer * part);
    const float4* from = (const float4*)x + (long long)peer * part;
    char* to = ex.slot(peer, RANK);
    if (HALF) rh_send_rows<VECTORS, THREADS>(from, (uint2*)to, (float*)(to + inverses), begin, end, row);
    else rh_copy(from, (float4*)to, begin, end);
  }
  if (!SENT) ex.signal(2 * now);
  int last = min(min(begin + piece, part), vectors - RANK * part);
  int first = begin + threadIdx.x / THREADS * row, stride = blockDim.x / THREADS * row, end = min(first + row, last);
  const float4 *own = (const float4*)x + (long long)RANK * part, *old = (const float4*)residual;
  rh_OwnRow<VECTORS, THREADS, RESIDUAL> next;
  next.load(own, old, first, end);  // while the other GPUs send
  if (threadIdx.x < RANKS && threadIdx.x != RANK) results[threadIdx.x] = ex.wait_for_address(threadIdx.x, now);
  if (SENT) ex.wait_for_tiles(begin / row, last / row, 4 * row / RH_SENT_COLUMNS, now);
  else ex.wait(2 * now);
  while (first < last) {
    float4 total[VECTORS];
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) total[u] = RESIDUAL ? rh_add(next.x[u], next.residual[u]) : next.x[u];
    for (int step = 1; step < RANKS; ++step) {
      const char* from = ex.slot(RANK, ex.peer(step));
      const float* scales = (const float*)(from + inverses) + first / row;
      float inverse = HALF && !SENT ? __ldcg(scales) : 1.0f;
#pragma unroll
      for (int u = 0; u < VECTORS; ++u) {
        int i = first + threadIdx.x % THREADS + u * THREADS;
        if (SENT && i < end) inverse = __ldcg(scales + 4 * (i - first) / RH_SENT_COLUMNS * part_rows);
        if (i < end) total[u] = rh_add(total[u], rh_scale(rh_load<HALF>(from, i), inverse));
      }
    }
    int begins = first, ends = end;
    first += stride;
    end = min(first + row, last);
    if (VECTORS <= RH_AHEAD_VECTORS) next.load(own, old, first, end);  // while this row is stored
    float inverse = 1.0f, mean = 0.0f;
    if (NORM == RH_LAYER_NORM) {
#pragma unroll
      for (int u = 0; u < VECTORS; ++u) mean += total[u].x + total[u].y + total[u].z + total[u].w;  // 0 beyond the row
      mean = rh_reduce<false>(mean, THREADS) / (4 * row);
    }
    if (NORM) {
      float squares = 0.0f;
#pragma unroll
      for (int u = 0; u < VECTORS; ++u) {
        int i = begins + threadIdx.x % THREADS + u * THREADS;
        if (i >= ends) continue;
        float4 v = make_float4(total[u].x - mean, total[u].y - mean, total[u].z - mean, total[u].w - mean);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      }
      inverse = rsqrtf(rh_reduce<false>(squares, THREADS) / (4 * row) + eps);
    }
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int i = begins + threadIdx.x % THREADS + u * THREADS;
      if (i >= ends) continue;
      if (SUM) ((float4*)sum)[i] = total[u];
      float4 v = total[u];
      if (NORM) {
        float4 w = ((const float4*)weight)[i - begins];
        v = make_float4((v.x - mean) * inverse * w.x, (v.y - mean) * inverse * w.y, (v.z - mean) * inverse * w.z,
                        (v.w - mean) * inverse * w.w);
      }
      if (NORM == RH_LAYER_NORM) v = rh_add(v, ((const float4*)bias)[i - begins]);
      long long to = (long long)RANK * part + i;
      rh_store<HALF>(out, to, v);
      for (int step = 1; step < RANKS; ++step) rh_store<HALF>((void*)results[ex.peer(step)], to, v);
    }
    if (VECTORS > RH_AHEAD_VECTORS) next.load(own, old, first, end);
  }
  ex.signal(2 * now + 1);
  ex.wait(2 * now + 1);
}
#endif
"""
)


@dataclass(frozen=True)
class RowNorm:
    """Norm of the rows of a sum, with a weight for each column: an RMS norm, or a layer norm, which adds a bias."""

    eps: float  # number that is added to the mean of the squares
    dtype: str  # type of the result, float32 or float16
    is_centered: bool = False  # whether it is a layer norm


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of float32, the same on all GPUs."""

    shape: tuple[int, ...]  # shape of the operand
    ranks: int  # number of GPUs
    norm: RowNorm | None = None  # norm of the sum's rows
    has_residual: bool = False  # whether each GPU adds its part of a residual to its rows; only for long operands
    is_residual_whole: bool = False  # whether each GPU has all of the residual, not its part alone

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
        return 4 * self.count <= self.max_short_bytes

    @property
    def max_short_bytes(self) -> int:
        """Maximum bytes of a short operand; GPUs do not share rows that they cannot share equally."""
        is_equal = self.count // max(1, self.width) % self.ranks == 0
        return max_short_bytes(self.ranks) if is_equal else LAMPORT_BYTES

    @property
    def sum_shape(self) -> tuple[int, ...]:
        """Shape of the sum beside a norm's result: a GPU's part of the rows if the operand is long."""
        return self.shape if self.is_short else (self.count // self.width // self.ranks, self.width)

    def declare_residual(self, function: Function) -> tirx.Buffer | None:
        """Declare the residual as a kernel's next operand; None if there is none."""
        shape = self.shape if self.is_residual_whole else self.sum_shape
        return function.argument("residual", list(shape), "float32") if self.has_residual else None

    def residual_rows(self, residual: tirx.Buffer, rank: int) -> tirx.PrimExpr:
        """Address of a GPU's part of the residual's rows."""
        begin = rank * prod(self.sum_shape) if self.is_residual_whole else 0
        return T.address_of(residual[tuple(map(int, np.unravel_index(begin, [int(each) for each in residual.shape])))])

    @property
    def supports_rows(self) -> bool:
        """True if a norm can be a part of it, and a residual if it is long."""
        fits = self.width % 4 == 0 and self.width <= 4 * _MAX_VECTORS * _MAX_THREADS
        return fits and (self.is_short or self.count // self.width % self.ranks == 0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that it needs for each GPU."""
        return LAMPORT_BYTES if self.is_short else LONG_OPERANDS + 16 * self._part_vectors

    @property
    def threads(self) -> int:
        """Threads of a block."""
        if not self.is_short:
            return _MAX_THREADS
        return _THREADS if self.norm is None else min(_MAX_THREADS, ceil(self.row / _SHORT_VECTORS / WARP) * WARP)

    @property
    def row_threads(self) -> int:
        """Threads of a row: a block's for short operands, else fewer if a block has several rows."""
        if self.is_short or (self.norm is None and not self.has_residual):
            return self.threads
        rows = ceil(self.count // self.width / self.ranks / self.blocks)
        per_thread = _AHEAD_VECTORS if self.row <= _AHEAD_VECTORS * _MAX_THREADS else _MAX_VECTORS
        needed = max(ceil(self.row / per_thread), self.threads // rows)
        return next(threads for threads in _ROW_THREADS if threads >= needed)

    @property
    def row(self) -> int:
        """Fours of numbers that a block adds at a time: a row, if there are rows."""
        if self.norm is not None or self.has_residual:
            return self.width // 4
        vectors = self.count // 4
        if self.is_short:
            return ceil(vectors / max(1, min(FLAG_BLOCKS, vectors // _THREADS)))
        return min(_MAX_VECTORS * _MAX_THREADS, ceil(vectors / (self.ranks * _LONG_BLOCKS)))

    @property
    def blocks(self) -> int:
        """Blocks of a kernel."""
        rows = ceil(self.count // 4 / self.row)
        return min(FLAG_BLOCKS, rows) if self.is_short else min(_LONG_BLOCKS, ceil(rows / self.ranks))

    @property
    def _part_vectors(self) -> int:
        return ceil(ceil(self.count // 4 / self.row) / self.ranks) * self.row


@dataclass(frozen=True)
class RankReduce:
    """The part of a GPU in an all-reduce."""

    reduce: AllReduce
    rank: int  # number of this GPU among the GPUs
    keeps_sum: bool  # whether there is a second result, the sum, beside that of the norm
    slot: int = 0  # slot of the GPUs' memory, see `slots_of`
    slot_bytes: int = 0  # bytes of a slot for each GPU, at least `AllReduce.slot_bytes`
    why: str = ""  # reason why NCCL sums; empty for kernels that write to the memory of other GPUs

    @property
    def sent(self) -> SentSum | None:
        """The sum, if products' kernels may send its operands: short ones, and long ones as tiles of float16."""
        reduce, (rows, columns) = self.reduce, SENT_TILE
        own = SentSum(self.rank, reduce.ranks, self.slot, self.slot_bytes)
        if reduce.is_short:
            return own
        if reduce.norm is None or reduce.norm.dtype != "float16":
            return None
        part_rows = reduce.count // reduce.width // reduce.ranks
        if part_rows % rows or reduce.width % columns:
            return None
        flags = part_rows // _SENT_ROWS * (reduce.width // columns)
        return own if 4 * flags <= SENT_FLAGS_BYTES else None

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


def sends_short(shape: Sequence[int], sent: SentSum | None) -> bool:
    """Return whether a product's result is an operand of a short sum.

    Parameters
    ----------
    shape : sequence of int
        Extents of the result, of float32.
    sent : SentSum, optional
        The sum; None if it is not known yet: that of two GPUs, which are short up to the most bytes.
    """
    return AllReduce(tuple(shape), 2 if sent is None else sent.ranks).is_short


def max_short_bytes(ranks: int) -> int:
    """Maximum bytes of an operand that every GPU adds; of a longer one, each adds its part of the rows.

    Up to these, `all_reduce_seconds` over NVLink is as short. vLLM's limits of such sums are 512 KB for up to four
    GPUs, and 256 KB for eight.
    """
    sent = (ranks - 1) * (1 - 2 / ranks)  # operands that a GPU sends more
    return min(LAMPORT_BYTES, int(_FLAG_SECONDS * NVLINK_BYTES_PER_SECOND / sent)) if sent else LAMPORT_BYTES


def all_reduce_seconds(ranks: int, link_seconds: float, is_short: bool) -> float:
    """Estimate of an all-reduce in a graph, by what each GPU sends.

    Parameters
    ----------
    ranks : int
        Number of GPUs.
    link_seconds : float
        Time of the operand's bytes over the link between two GPUs.
    is_short : bool
        Whether each GPU sends all of its operand to every other one (`max_short_bytes`), instead of their rows before,
        and its own rows of the sum after it is added.
    """
    sent = (ranks - 1) * link_seconds
    return _SHORTEST_SECONDS + (sent if is_short else _FLAG_SECONDS + sent * 2 / ranks)


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
    is_sent: bool = False,
) -> tirx.PrimFunc:
    """Make the kernel of a GPU.

    Parameters
    ----------
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
    is_sent : bool
        True if the kernels of the operands' products have sent them (`send_words`), or the rows of long ones that
        other GPUs add (`send_tile`).

    Returns
    -------
    tirx.PrimFunc
        Function of the operand; the addresses of all GPUs' memory, (ranks,) of int64; the last kernel's result, which
        only orders kernels; the residual, or this GPU's rows of it, if there is one; the norm's weight, (width,) of
        float32, if there is a norm; the bias of a layer norm; and the results: that of the norm or the sum, then the
        sum of `AllReduce.sum_shape` if it is kept.
    """
    norm, shape = reduce.norm, list(reduce.shape)
    function = Function(f"all_reduce_{rank}", registers="local")
    with function:
        x = function.argument("x", shape, "float32")
        bases = function.argument("bases", [reduce.ranks], "int64")
        function.argument("after", list(after[0]), after[1])
        residual = reduce.declare_residual(function)
        weight = function.argument("weight", [reduce.width], "float32") if norm is not None else None
        is_centered = norm is not None and norm.is_centered
        bias = function.argument("bias", [reduce.width], "float32") if is_centered else None
        out = function.argument("out", shape, norm.dtype if norm is not None else "float32")
        total = function.argument("total", reduce.sum_shape, "float32") if keeps_sum else None
        own = RankReduce(reduce, rank, keeps_sum, slot, slot_bytes)
        buffers = _Buffers(x, bases, residual, weight, bias, out, total)
        with function.body(), launch(reduce.blocks, reduce.threads):
            (_write_short if reduce.is_short else _write_long)(own, buffers, is_sent)
    kernel = function.result.with_attrs({"tirx.is_scheduled": True, ALL_REDUCE: own.to_json()})
    constants = [1, *range(3, 3 + (weight is not None) + (bias is not None))]
    return enable_pdl(kernel, constants) if reduce.is_short else kernel


class _Buffers(NamedTuple):
    """Buffers of a kernel; None for those that it does not have."""

    x: tirx.Buffer
    bases: tirx.Buffer
    residual: tirx.Buffer | None
    weight: tirx.Buffer | None
    bias: tirx.Buffer | None
    out: tirx.Buffer
    total: tirx.Buffer | None

    def pointers(self, *names: str) -> list[tirx.PrimExpr]:
        """Addresses of buffers; that of `x` for one that the kernel does not have, and so does not use."""
        buffers = [self.x if (buffer := getattr(self, name)) is None else buffer for name in names]
        return [T.address_of(buffer[(0,) * len(buffer.shape)]) for buffer in buffers]


def _template(own: RankReduce) -> list[Any]:
    """Template parameters of the functions of short and of long operands."""
    reduce, norm = own.reduce, own.reduce.norm
    vectors, threads = ceil(reduce.row / reduce.row_threads), reduce.row_threads
    kind = "RH_NO_NORM" if norm is None else "RH_LAYER_NORM" if norm.is_centered else "RH_RMS_NORM"
    return [vectors, threads, own.rank, reduce.ranks, kind, norm is not None and norm.dtype == "float16", own.keeps_sum]


def _sizes(own: RankReduce) -> list[tirx.PrimExpr]:
    """The slot, fours of numbers of the operand and of a row, and the norm's epsilon."""
    reduce, norm = own.reduce, own.reduce.norm
    return [*map(T.int32, (own.slot, reduce.count // 4, reduce.row)), T.float32(norm.eps if norm is not None else 0.0)]


def _write_long(own: RankReduce, buffers: _Buffers, is_sent: bool) -> None:
    """Write the body of the kernel of a long operand."""
    reduce, ranks, residual = own.reduce, own.reduce.ranks, buffers.residual
    data = data_offset(own.slot, ranks, own.slot_bytes) + LONG_OPERANDS
    _call(
        "rh_all_reduce_long",
        [*_template(own), reduce.has_residual, is_sent],
        *buffers.pointers("x"),
        *(buffers.pointers("x") if residual is None else [reduce.residual_rows(residual, own.rank)]),
        *buffers.pointers("weight", "bias", "out", "total", "bases"),
        *map(T.int64, (data, own.slot_bytes, flags_offset(own.slot, ranks), state_offset(ranks))),
        *_sizes(own),
    )


def _write_short(own: RankReduce, buffers: _Buffers, is_sent: bool) -> None:
    """Write the body of the kernel of a short operand, whose words have a place of their own, zero when they arrive.

    It reads constants before the kernels before have ended. To read words then, too, saves nothing: on an H200, a
    product of 32 rows by 7168 x 4096 took 19.5 us, not 16.4, while the sum's kernel loaded words. Where the sum began
    after the product's last loads, and read this GPU's numbers as words, too, instead of waiting for the product, the
    product took 17.1 us, not 15.9, and the sum 2.3, not 3.1: a layer of 32 rows on two H200s took 79.2 us, not 79.4,
    and one of one row 66.4, not 66.2.
    """
    reduce, ranks, template = own.reduce, own.reduce.ranks, _template(own)
    addresses = [T.bind(buffers.bases[int64(each)]) for each in range(ranks)]
    columns = []
    for name in ("weight", "bias"):
        registers = T.address_of(T.alloc_buffer((template[0],), "float32x4", scope="local")[0])
        if getattr(buffers, name) is not None:
            _call("rh_load_numbers", template[:2], *buffers.pointers(name), registers, 0, reduce.row)
        columns.append(registers)
    with T.attr(0, WAIT, 1):
        T.evaluate(0)
    _call(
        "rh_all_reduce_short",
        [*template, is_sent],
        *buffers.pointers("x", "out", "total"),
        *columns,
        *map(T.int64, (data_offset(own.slot, ranks, own.slot_bytes), own.slot_bytes, state_offset(ranks))),
        *_sizes(own),
        *addresses,
    )


def _call(name: str, parameters: Sequence[Any], *arguments: Any) -> None:
    """Write the call of a function of `SOURCE`, given the parameters of the template."""
    texts = ", ".join(str(each).lower() if isinstance(each, bool) else str(each) for each in parameters)
    name = f"{name}<{texts}>" if texts else name
    T.evaluate(T.cuda.func_call(name, *arguments, source_code=SOURCE, return_type="void"))


def send_tile(
    sent: SentSum,
    shape: tuple[int, int],
    pointers: tuple[tirx.PrimExpr, tirx.PrimExpr],
    origin: tuple[tirx.PrimExpr, tirx.PrimExpr],
) -> None:
    """Write that two warps send a tile of `SENT_TILE`, which their block has stored, unless this GPU adds it.

    Parameters
    ----------
    shape : tuple of int
        Rows and columns of the operand of the sum.
    pointers : tuple of PrimExpr
        To the operand, and to the addresses of all GPUs' memory.
    origin : tuple of PrimExpr
        First row and column of the tile.
    """
    data = data_offset(sent.slot, sent.ranks, sent.slot_bytes) + LONG_OPERANDS
    _call(
        "rh_send_tile",
        [sent.rank, sent.ranks],
        *pointers,
        *map(T.int64, (data, sent.slot_bytes, state_offset(sent.ranks))),
        *map(T.int32, (sent.slot, shape[0] // sent.ranks, shape[1])),
        *(T.Cast("int32", value) for value in origin),
    )


def word_places(sent: SentSum, addresses: tirx.Buffer) -> list[tirx.PrimExpr]:
    """Write the computation of the places in the memory of the other GPUs for the words that this GPU sends for a sum.

    Parameters
    ----------
    addresses : tirx.Buffer
        Addresses of all GPUs' memory.
    """
    data = data_offset(sent.slot, sent.ranks, sent.slot_bytes) + sent.rank * sent.slot_bytes
    peers = [rank for rank in range(sent.ranks) if rank != sent.rank]
    return [T.bind(addresses[int64(peer)] + int64(data)) for peer in peers]


def send_words(places: Sequence[tirx.PrimExpr], values: Sequence[tirx.PrimExpr], start: tirx.PrimExpr) -> None:
    """Write that a thread sends four neighbouring numbers of the operand of a short sum to the other GPUs.

    Parameters
    ----------
    places : sequence of PrimExpr
        See `word_places`.
    values : sequence of PrimExpr
        The numbers, float32.
    start : PrimExpr
        Number of the first one in the operand, a multiple of four.
    """
    for place in places:
        _call("rh_send_words", [], place, T.Cast("int32", tirx.floordiv(start, int64(4))), *values)
