"""Kernels around NCCL's collectives, which work on one buffer on each GPU: what they send and what they have received.

`stage_kernel` and `finish_kernel` of `all_reduce` are those of sums; here are those of tensors that cross between GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...artifact.nccl_layout import offsets
from ...target.element_types import bytes_for
from ..core.builder import Function
from .all_reduce import AFTER_NCCL
from .loops.launch import launch

EXCHANGE = "relax_hetero.exchange"
"""On the kernel of each GPU after an exchange: the exchange's `Exchange.description`."""

_THREADS = 256
_MAX_BLOCKS = 1024

_SOURCE = r"""
#ifndef RH_EXCHANGE  // a kernel that calls several of these functions has this text several times
#define RH_EXCHANGE
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


@dataclass(frozen=True)
class Transfer:
    """A tensor that crosses from a GPU to another one.

    Attributes
    ----------
    source, target : int
        Ranks of the GPUs in their mesh.
    shape : tuple of int
    dtype : str
    """

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
    """Tensors that cross between the GPUs of a mesh at once.

    Attributes
    ----------
    ranks : int
        Number of GPUs.
    transfers : tuple of Transfer
    """

    ranks: int
    transfers: tuple[Transfer, ...]

    @property
    def description(self) -> tuple[int, ...]:
        """Source, target and bytes of each tensor, as `artifact.nccl_layout` describes collectives."""
        return tuple(number for each in self.transfers for number in (each.source, each.target, each.bytes))

    def of(self, rank: int, sends: bool) -> list[tuple[Transfer, int]]:
        """List what a GPU sends, or receives, with offsets in its buffer."""
        pairs = zip(self.transfers, offsets(self.description), strict=True)
        return [(each, offset) for each, offset in pairs if rank == (each.source if sends else each.target)]


Form = tuple[Sequence[int], str]
"""Shape and type of a tensor."""


def send_kernel(exchange: Exchange, rank: int, after: Form) -> tirx.PrimFunc:
    """Make the kernel that copies what a GPU sends to its buffer.

    Parameters
    ----------
    exchange : Exchange
    rank : int
        Rank of the GPU.
    after : tuple
        Shape and type of the last collective's result.

    Returns
    -------
    tirx.PrimFunc
        Function of the tensors; the addresses of all GPUs' buffers, (ranks,) of int64; the last collective's result,
        which only orders kernels; and a result, (1,) of float32, which orders `receive_kernel` after this one.
    """
    pairs = exchange.of(rank, sends=True)
    function = Function(f"send_{rank}", registers="local")
    with function:
        tensors = [function.argument(f"x{i}", list(each.shape), each.dtype) for i, (each, _) in enumerate(pairs)]
        bases = function.argument("bases", [exchange.ranks], "int64")
        function.argument("after", list(after[0]), after[1])
        token = function.argument("token", [1], "float32")
        _copy(function, tensors, pairs, bases, rank, token, sends=True)
    return function.result.with_attrs({"tirx.is_scheduled": True})


def receive_kernel(exchange: Exchange, rank: int, number: int, mesh: Sequence[int]) -> tirx.PrimFunc:
    """Make the kernel after NCCL's exchange.

    Parameters
    ----------
    exchange : Exchange
    rank : int
        Rank of the GPU.
    number : int
        Number of the exchange among the function's collectives.
    mesh : sequence of int
        Indices of the mesh's devices in the manifest.

    Returns
    -------
    tirx.PrimFunc
        Function of the addresses of all GPUs' buffers, (ranks,) of int64; the result of `send_kernel`, which only
        orders kernels; and the received tensors.
    """
    pairs = exchange.of(rank, sends=False)
    function = Function(f"receive_{rank}", registers="local")
    with function:
        bases = function.argument("bases", [exchange.ranks], "int64")
        function.argument("token", [1], "float32")
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


def _pointer(buffer: Any) -> tirx.PrimExpr:
    return T.address_of(buffer[(0,) * len(buffer.shape)])


def _call(name: str, *arguments: tirx.PrimExpr) -> None:
    T.evaluate(T.cuda.func_call(name, *arguments, source_code=_SOURCE, return_type="void"))
