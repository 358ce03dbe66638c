"""Kernels around NCCL's collectives, which work on one buffer on each GPU: before and after a sum, and an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...artifact.nccl_layout import offsets
from ...target.element_types import bytes_for
from ...target.gpu_target import WARP
from ..core.builder import Function
from .all_reduce import SOURCE, AllReduce, RankReduce
from .loops.launch import launch

AFTER_NCCL = "relax_hetero.after_nccl"
"""On a PrimFunc that NCCL's kernels precede: the number of the collective among those of the function, the GPU's rank,
and the indices of the mesh's devices."""

NCCL_SUM = "relax_hetero.nccl_sum"  # on the kernel of each GPU after a sum: JSON of a `RankReduce`
EXCHANGE = "relax_hetero.exchange"  # on the kernel of each GPU after an exchange: the exchange's `Exchange.description`

_THREADS = 512
_MAX_THREADS = 1024
_MAX_BLOCKS = 1024

_SOURCE = (
    SOURCE
    + r"""
#ifndef RH_NCCL  // a kernel that calls several of these functions has this text several times
#define RH_NCCL
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
template <bool NORM, bool CENTERED, bool HALF, bool SUM> __device__ __forceinline__ void rh_finish(
    const void* weight, const void* bias, void* out, void* sum, const void* bases, int rank, int vectors, int row,
    int begin, int end, float eps) {
  const float4* from = (const float4*)((const long long*)bases)[rank];
  for (int first = blockIdx.x * row; first < vectors; first += gridDim.x * row) {
    int last = min(first + row, vectors);
    float inverse = 1.0f, mean = 0.0f;
    if (CENTERED) {
      for (int i = first + threadIdx.x; i < last; i += blockDim.x) {
        float4 v = __ldcg(from + i);
        mean += v.x + v.y + v.z + v.w;
      }
      mean = rh_reduce<false>(mean, blockDim.x) / (4 * row);
    }
    float4 shift = make_float4(-mean, -mean, -mean, -mean);
    if (NORM) {
      float squares = 0.0f;
      for (int i = first + threadIdx.x; i < last; i += blockDim.x) {
        float4 v = rh_add(__ldcg(from + i), shift);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      }
      inverse = rsqrtf(rh_reduce<false>(squares, blockDim.x) / (4 * row) + eps);
    }
    for (int i = first + threadIdx.x; i < last; i += blockDim.x) {
      float4 v = __ldcg(from + i);
      if (SUM && i >= begin && i < end) ((float4*)sum)[i - begin] = v;
      if (NORM) {
        float4 w = ((const float4*)weight)[i - first];
        v = rh_add(v, shift);
        v = make_float4(v.x * inverse * w.x, v.y * inverse * w.y, v.z * inverse * w.z, v.w * inverse * w.w);
      }
      if (CENTERED) v = rh_add(v, ((const float4*)bias)[i - first]);
      rh_store<HALF>(out, i, v);
    }
  }
}
template <class Vector> __device__ __forceinline__ void rh_copy_vectors(const void* from, void* to, long long count) {
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    ((Vector*)to)[i] = ((const Vector*)from)[i];
  }
}
__device__ __forceinline__ void rh_copy_bytes(const void* from, void* to, long long bytes) {
  long long bits = (long long)from | (long long)to | bytes;
  if (bits % 16 == 0) rh_copy_vectors<uint4>(from, to, bytes / 16);
  else if (bits % 4 == 0) rh_copy_vectors<unsigned>(from, to, bytes / 4);
  else rh_copy_vectors<char>(from, to, bytes);
}
template <bool SENDS> __device__ __forceinline__ void rh_exchanged(
    void* tensor, const void* bases, int rank, long long offset, long long bytes) {
  char* buffer = (char*)((const long long*)bases)[rank] + offset;
  if (SENDS) rh_copy_bytes(tensor, buffer, bytes); else rh_copy_bytes(buffer, tensor, bytes);
}
__device__ __forceinline__ void rh_token(float* token) { if (blockIdx.x == 0 && threadIdx.x == 0) *token = 0.0f; }
#endif
"""
)

Form = tuple[Sequence[int], str]  # shape and type of a tensor
_TOKEN: Form = ([1], "float32")  # result of a kernel before NCCL's, which orders the kernel after them


def stage_kernel(own: RankReduce, after: Form) -> tirx.PrimFunc:
    """Make the kernel that copies a GPU's operand to the memory in which NCCL sums.

    `after`: shape and type of the last kernel's result. Returns the function of the operand; the addresses of all GPUs'
    memory, (ranks,) of int64; the last kernel's result, which only orders kernels; the residual, or the GPU's rows of
    it, if there is one; and a result, (1,) of float32, which orders `finish_kernel` after this one.
    """
    reduce = own.reduce
    function = Function(f"stage_{own.rank}", registers="local")
    with function:
        x = function.argument("x", list(reduce.shape), "float32")
        bases = _bases_after(function, reduce.ranks, "after", after)
        residual = reduce.declare_residual(function)
        token = function.argument("token", *_TOKEN)
        with function.body(), launch(_copy_blocks(reduce), _THREADS):
            rows = _pointer(x) if residual is None else reduce.residual_rows(residual, own.rank)
            pointers = [_pointer(x), rows, _pointer(token), _pointer(bases)]
            numbers = own.rank, reduce.count // 4, prod(reduce.sum_shape) // 4
            call = f"rh_stage<{str(reduce.has_residual).lower()}>"
            _call(call, *pointers, *map(T.int32, numbers))
    return function.result.with_attrs({"tirx.is_scheduled": True})


def finish_kernel(own: RankReduce, number: int, mesh: Sequence[int]) -> tirx.PrimFunc:
    """Make the kernel after NCCL's sum, which writes the results of `all_reduce_kernel`.

    `number`: number of the sum among the function's collectives. `mesh`: indices of the mesh's devices in the manifest.
    Returns the function of the addresses of all GPUs' memory, (ranks,) of int64; the result of `stage_kernel`, which
    only orders kernels; the norm's weight, if there is a norm; the bias of a layer norm; and the results.
    """
    reduce = own.reduce
    norm, row = reduce.norm, reduce.width // 4 if reduce.norm is not None else _THREADS
    threads = min(_MAX_THREADS, ceil(row / WARP) * WARP)
    blocks = _copy_blocks(reduce) if norm is None else min(_MAX_BLOCKS, reduce.count // reduce.width)
    function = Function(f"finish_{own.rank}", registers="local")
    with function:
        bases = _bases_after(function, reduce.ranks, "token", _TOKEN)
        weight = function.argument("weight", [reduce.width], "float32") if norm is not None else None
        is_centered = norm is not None and norm.is_centered
        bias = function.argument("bias", [reduce.width], "float32") if is_centered else None
        out = function.argument("out", list(reduce.shape), norm.dtype if norm is not None else "float32")
        total = function.argument("total", reduce.sum_shape, "float32") if own.keeps_sum else None
        with function.body(), launch(blocks, threads):
            pointers = [_pointer(bases if buffer is None else buffer) for buffer in (weight, bias, out, total, bases)]
            kept = prod(reduce.sum_shape) // 4
            begin = 0 if reduce.is_short else own.rank * kept
            kinds = (norm is not None, is_centered, norm is not None and norm.dtype == "float16", own.keeps_sum)
            call = f"rh_finish<{', '.join(str(kind).lower() for kind in kinds)}>"
            numbers = own.rank, reduce.count // 4, row, begin, begin + kept
            eps = T.float32(norm.eps if norm is not None else 0.0)
            _call(call, *pointers, *map(T.int32, numbers), eps)
    attributes = {"tirx.is_scheduled": True, NCCL_SUM: own.to_json(), AFTER_NCCL: [number, own.rank, *mesh]}
    return function.result.with_attrs(attributes)


def _copy_blocks(reduce: AllReduce) -> int:
    return min(_MAX_BLOCKS, ceil(reduce.count // 4 / _THREADS))


@dataclass(frozen=True)
class Transfer:
    """A tensor that crosses from a GPU to another one."""

    # Ranks of the GPUs in their mesh.
    source: int
    target: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return bytes_for(self.shape, self.dtype)


@dataclass(frozen=True)
class Exchange:
    """Tensors that cross between the GPUs of a mesh at once."""

    ranks: int  # number of GPUs
    transfers: tuple[Transfer, ...]

    @property
    def description(self) -> tuple[int, ...]:
        """Source, target and bytes of each tensor, as `artifact.nccl_layout` describes collectives."""
        return tuple(number for each in self.transfers for number in (each.source, each.target, each.bytes))

    def of(self, rank: int, sends: bool) -> list[tuple[Transfer, int]]:
        """List what a GPU sends, or receives, with offsets in its buffer."""
        pairs = zip(self.transfers, offsets(self.description), strict=True)
        return [(each, offset) for each, offset in pairs if rank == (each.source if sends else each.target)]


def send_kernel(exchange: Exchange, rank: int, after: Form) -> tirx.PrimFunc:
    """Make the kernel that copies what a GPU sends to its buffer.

    `rank`: rank of the GPU. `after`: shape and type of the last collective's result. Returns the function of the
    tensors; the addresses of all GPUs' buffers, (ranks,) of int64; the last collective's result, which only orders
    kernels; and a result, (1,) of float32, which orders `receive_kernel` after this one.
    """
    pairs = exchange.of(rank, sends=True)
    function = Function(f"send_{rank}", registers="local")
    with function:
        tensors = [function.argument(f"x{i}", list(each.shape), each.dtype) for i, (each, _) in enumerate(pairs)]
        bases = _bases_after(function, exchange.ranks, "after", after)
        token = function.argument("token", *_TOKEN)
        _copy(function, tensors, pairs, bases, rank, token, sends=True)
    return function.result.with_attrs({"tirx.is_scheduled": True})


def receive_kernel(
    exchange: Exchange,
    rank: int,  # rank of the GPU
    number: int,  # number of the exchange among the function's collectives
    mesh: Sequence[int],  # indices of the mesh's devices in the manifest
) -> tirx.PrimFunc:
    """Make the kernel after NCCL's exchange.

    Returns the function of the addresses of all GPUs' buffers, (ranks,) of int64; the result of `send_kernel`, which
    only orders kernels; and the received tensors.
    """
    pairs = exchange.of(rank, sends=False)
    function = Function(f"receive_{rank}", registers="local")
    with function:
        bases = _bases_after(function, exchange.ranks, "token", _TOKEN)
        tensors = [function.argument(f"out{i}", list(each.shape), each.dtype) for i, (each, _) in enumerate(pairs)]
        _copy(function, tensors, pairs, bases, rank, None, sends=False)
    attributes = {AFTER_NCCL: [number, rank, *mesh], EXCHANGE: list(exchange.description)}
    return function.result.with_attrs({"tirx.is_scheduled": True, **attributes})


def _copy(
    function: Function,
    tensors: Sequence[Any],
    pairs: Sequence[tuple[Transfer, int]],
    bases: Any,
    rank: int,
    token: Any,
    sends: bool,
) -> None:
    """Write the body of a kernel that copies tensors to or from a buffer."""
    blocks = min(_MAX_BLOCKS, ceil(max(each.bytes for each, _ in pairs) / 16 / _THREADS))
    with function.body(), launch(blocks, _THREADS):
        for tensor, (each, offset) in zip(tensors, pairs, strict=True):
            numbers = T.int32(rank), T.int64(offset), T.int64(each.bytes)
            _call(f"rh_exchanged<{str(sends).lower()}>", _pointer(tensor), _pointer(bases), *numbers)
        if token is not None:
            _call("rh_token", _pointer(token))


def _bases_after(function: Function, ranks: int, name: str, result: Form) -> Any:
    """The addresses of all GPUs' buffers, and the parameter after it: a kernel's result, which only orders kernels."""
    bases = function.argument("bases", [ranks], "int64")
    function.argument(name, list(result[0]), result[1])
    return bases


def _pointer(buffer: Any) -> tirx.PrimExpr:
    return T.address_of(buffer[(0,) * len(buffer.shape)])


def _call(name: str, *arguments: tirx.PrimExpr) -> None:
    T.evaluate(T.cuda.func_call(name, *arguments, source_code=_SOURCE, return_type="void"))
