"""All-reduce over GPUs that access each other's memory: one kernel a GPU, without a copy and without the host.

Each GPU has memory that the others write to (`artifact.peer_layout`). A thread stores its elements of the operand in a
slot of every other GPU, waits for theirs, and adds in the order of the GPUs, so that all get the same bits. Every GPU
sends its whole operand, which is optimal for two, and takes the fewest messages for short operands ("one-shot", as in
TensorRT-LLM and vLLM). There are two protocols:

- Short operands: each four bytes are stored beside the kernel's epoch, in one access of eight bytes, so that whoever
  reads the epoch has the data (NCCL's LL). It takes twice the bytes, but neither fences nor flags.
- Long operands: a block stores a chunk of its part and sets a flag, and meanwhile adds the chunk before, for which it
  waits for the others' flags. A flag is a multiple of the epoch plus the number of the chunk.

The epoch is the number of a mesh's kernels so far, so that nothing ever is reset. A slot may be written again when no
GPU reads it any more: consecutive kernels use different slots, and when one has ended, all GPUs have ended the one
before it. `slots_of` numbers them so that this holds between calls, too.

Kernels of a program must begin in the same order on all GPUs. Each takes the last one's result as an operand that it
does not read, so that passes keep their order.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...artifact.peer_layout import FLAG_BLOCKS, data_offset, epoch_offset
from ..core.builder import Function
from .loops.launch import launch

ALL_REDUCE = "relax_hetero.all_reduce"
"""On a PrimFunc: it exchanges values with the kernels of other devices."""

_THREADS = 512
_CHUNKS = 8
_TIMEOUT_SECONDS = 60

_LL_BYTES = 512 << 10
"""Maximum bytes of a short operand: for longer ones, sending twice the bytes takes longer than a fence."""

_SOURCE = f"""
__device__ __forceinline__ unsigned rh_epoch(const unsigned* state) {{
  return *(const volatile unsigned*)state + 1;
}}
// The last block ends the epoch: then all have read it.
__device__ __forceinline__ void rh_end_epoch(unsigned* state, unsigned now, int blocks, int thread) {{
  __syncthreads();
  if (thread == 0 && atomicAdd(state + 1, 1u) == blocks - 1) {{ state[1] = 0; state[0] = now; }}
}}
__device__ __forceinline__ unsigned long long rh_time() {{
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}}
__device__ __forceinline__ void rh_check_time(unsigned long long begin) {{
  if (rh_time() - begin > {_TIMEOUT_SECONDS}000000000ull) __trap();
}}
__device__ __forceinline__ void rh_all_reduce_short(
    const float* x, float* out, const void* addresses, int count, int rank, int ranks, int blocks,
    long long data, long long slot_bytes, long long epochs, int block, int thread) {{
  const long long* bases = (const long long*)addresses;
  char* own = (char*)bases[rank];
  unsigned* state = (unsigned*)(own + epochs);
  unsigned now = rh_epoch(state);
  int first = block * {_THREADS} + thread, step = blocks * {_THREADS}, pairs = count / 2;
  for (int i = first; i < pairs; i += step) {{
    uint2 v = ((const uint2*)x)[i];
    for (int other = 1; other < ranks; ++other) {{
      int peer = rank + other < ranks ? rank + other : rank + other - ranks;
      char* to = (char*)bases[peer] + data + rank * slot_bytes + 16ll * i;
      asm volatile("st.volatile.global.v4.u32 [%0], {{%1, %2, %3, %2}};" :: "l"(to), "r"(v.x), "r"(now), "r"(v.y));
    }}
  }}
  for (int i = first; i < pairs; i += step) {{
    float2 total = make_float2(0.0f, 0.0f);
    for (int other = 0; other < ranks; ++other) {{
      float2 v;
      if (other == rank) {{
        v = ((const float2*)x)[i];
      }} else {{
        const char* from = own + data + other * slot_bytes + 16ll * i;
        unsigned a, b, flag, flag2, spins = 0;
        unsigned long long begin = 0;
        do {{
          asm volatile("ld.volatile.global.v4.u32 {{%0, %1, %2, %3}}, [%4];"
                       : "=r"(a), "=r"(flag), "=r"(b), "=r"(flag2) : "l"(from));
          if (++spins % 65536 == 0) {{ if (!begin) begin = rh_time(); else rh_check_time(begin); }}
        }} while (flag != now || flag2 != now);
        v = make_float2(__uint_as_float(a), __uint_as_float(b));
      }}
      total.x += v.x; total.y += v.y;
    }}
    ((float2*)out)[i] = total;
  }}
  rh_end_epoch(state, now, blocks, thread);
}}
__device__ __forceinline__ void rh_all_reduce_long(
    const float* x, float* out, const void* addresses, int count, int rank, int ranks, int blocks,
    long long data, long long slot_bytes, long long epochs, int block, int thread) {{
  const long long* bases = (const long long*)addresses;
  char* own = (char*)bases[rank];
  unsigned* state = (unsigned*)(own + epochs);
  unsigned now = rh_epoch(state);
  int vectors = count / 4, part = (vectors + blocks - 1) / blocks, chunk = (part + {_CHUNKS - 1}) / {_CHUNKS};
  int begin = block * part, end = min(begin + part, vectors);
  for (int number = 0; number <= {_CHUNKS}; ++number) {{
    if (number < {_CHUNKS}) {{  // send a chunk
      int last = min(begin + (number + 1) * chunk, end);
      for (int i = begin + number * chunk + thread; i < last; i += {_THREADS}) {{
        float4 v = ((const float4*)x)[i];
        for (int step = 1; step < ranks; ++step) {{
          int peer = rank + step < ranks ? rank + step : rank + step - ranks;
          ((float4*)((char*)bases[peer] + data + rank * slot_bytes))[i] = v;
        }}
      }}
      __syncthreads();
      if (thread < ranks && thread != rank) {{
        unsigned* theirs = (unsigned*)bases[thread] + rank * {FLAG_BLOCKS} + block;
        unsigned flag = now * {_CHUNKS} + number;
        asm volatile("fence.acq_rel.sys; st.release.sys.global.u32 [%0], %1;" :: "l"(theirs), "r"(flag) : "memory");
      }}
    }}
    if (number) {{  // add the chunk before it
      if (thread < ranks && thread != rank) {{
        unsigned* mine = (unsigned*)own + thread * {FLAG_BLOCKS} + block;
        unsigned seen, flag = now * {_CHUNKS} + number - 1;
        unsigned long long start = rh_time();
        do {{
          asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
          rh_check_time(start);
        }} while ((int)(seen - flag) < 0);
      }}
      __syncthreads();
      int last = min(begin + number * chunk, end);
      for (int i = begin + (number - 1) * chunk + thread; i < last; i += {_THREADS}) {{
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int other = 0; other < ranks; ++other) {{
          const float4* from = (const float4*)(own + data + other * slot_bytes) + i;
          float4 v = other == rank ? ((const float4*)x)[i] : __ldcg(from);
          total.x += v.x; total.y += v.y; total.z += v.z; total.w += v.w;
        }}
        ((float4*)out)[i] = total;
      }}
    }}
  }}
  rh_end_epoch(state, now, blocks, thread);
}}
"""


def slot_bytes_of(count: int) -> int:
    """Bytes of a slot that an operand of float32 needs for each GPU."""
    return 4 * count * (2 if _is_short(count) else 1)


def _is_short(count: int) -> bool:
    return 4 * count <= _LL_BYTES


def supports(count: int, dtype: str) -> bool:
    """Return whether the kernel reduces tensors of so many elements of a type."""
    return dtype == "float32" and count % 4 == 0 and 0 < count < 1 << 31


def slots_of(count: int) -> list[int]:
    """Slots of two or more consecutive kernels of a function: neighbours differ, and the last is not the first."""
    return [2 if number and number == count - 1 and number % 2 == 0 else number % 2 for number in range(count)]


def all_reduce_kernel(
    shape: list[int], rank: int, ranks: int, slot: int, slot_bytes: int, after_shape: list[int]
) -> tirx.PrimFunc:
    """Make the kernel of a GPU.

    Parameters
    ----------
    shape : list of int
        Shape of the operand and the result, of float32.
    rank, ranks : int
        Number of this GPU among the GPUs, and their number.
    slot : int
        Slot that it uses, see `slots_of`.
    slot_bytes : int
        Bytes of a slot for each GPU, at least `slot_bytes_of` the operand.
    after_shape : list of int
        Shape of the last kernel's result, of float32.

    Returns
    -------
    tirx.PrimFunc
        Function of the operand; the addresses of all GPUs' memory, (ranks,) of int64; the last kernel's result, which
        only orders kernels; and the result.
    """
    count = 1
    for extent in shape:
        count *= extent
    blocks = max(1, min(FLAG_BLOCKS, count // (2 if _is_short(count) else 4) // _THREADS))
    data = data_offset(slot, ranks, slot_bytes)
    function = Function(f"all_reduce_{rank}", registers="local")
    with function:
        x = function.argument("x", shape, "float32")
        bases = function.argument("bases", [ranks], "int64")
        function.argument("after", after_shape, "float32")
        out = function.argument("out", shape, "float32")
        with function.body(), launch(blocks, _THREADS) as (block, thread):
            first = [0] * len(shape)
            T.evaluate(
                T.cuda.func_call(
                    "rh_all_reduce_short" if _is_short(count) else "rh_all_reduce_long",
                    T.address_of(x[tuple(first)]),
                    T.address_of(out[tuple(first)]),
                    T.address_of(bases[0]),
                    *(T.int32(number) for number in (count, rank, ranks, blocks)),
                    *(T.int64(number) for number in (data, slot_bytes, epoch_offset(ranks))),
                    T.Cast("int32", block),
                    T.Cast("int32", thread),
                    source_code=_SOURCE,
                    return_type="void",
                )
            )
    return function.result.with_attrs({"tirx.is_scheduled": True, ALL_REDUCE: f"{rank} of {ranks}"})
