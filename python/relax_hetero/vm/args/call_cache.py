"""The call cache: a call whose arguments have the fingerprints of an earlier call is not checked again.

Checking a call costs several times as much as starting a small kernel. Checks depend only on each argument's
*fingerprint*: its device, element type, shape, contiguity and alignment. A call whose arguments were all borrowed is
cached by their fingerprints; every other call takes the slow path (`place`), which also reports errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.dims import DimValues, parse_dim
from ...artifact.signature import FunctionSignature, TensorSpec
from ..device.tensors import AddressRange, alias, from_array, nbytes_of
from .arguments import from_dlpack

Fingerprint: TypeAlias = tuple[bytes, tuple[int, ...]]

MAX_CACHED_CALLS = 256  # maximum number of cached calls per function; the cache is cleared beyond it

_Tensor, _Array = tvm_ffi.core.Tensor, np.ndarray
# A tensor object is a header (tvm/ffi/c_api.h, TVMFFIObject) and a DLTensor (dlpack.h): the pointer (8 bytes); device
# type and id, rank and element type (16); pointers to shape and strides (16); the byte offset (8).
_HEADER_BYTES = 24
_read_dltensor = (ctypes.c_char * 48).from_address
_NO_OFFSET = bytes(8)
_MISALIGNED = b"\1" * 48  # stands for an object that is not a tensor; never matches


@dataclass(slots=True)
class CachedCall:
    """A call that passed its checks."""

    nbytes: tuple[int, ...]  # bytes of each argument that results must not share memory with; 0 for a donated one
    sizes: tuple[int, ...]  # bytes of each argument
    moves: tuple[tuple[int, runtime.Device], ...]  # arguments to alias under another device id
    rest: tuple[Any, ...]  # parameters that follow the arguments, already placed
    rest_borrowed: list[AddressRange]  # their address ranges
    dims: DimValues  # the values of its symbolic dimensions
    outs: set[Fingerprint] = field(default_factory=set)  # fingerprints of ``out=`` buffers that passed their checks
    # Values computed once for all calls with these fingerprints (`driver.link.repeated_calls`), if `has_shared`.
    shared: tuple[Any, ...] = ()
    has_shared: bool = False  # whether they are computed
    is_plain: bool = False  # whether they are, and calls need nothing else besides the arguments
    pool_epoch: int = -1  # `PoolWatch.epoch` in which its extents were last noted; -1 before

    def determines_output_shape(self, signature: FunctionSignature) -> bool:
        """Return whether the arguments alone decide the shape of the function's one result."""
        if signature.output_is_tuple:
            return False
        (spec,) = signature.outputs
        names = self.dims.values.keys()
        return (
            isinstance(spec, TensorSpec)
            and spec.shape is not None
            and all(isinstance(dim, int) or parse_dim(dim).names <= names for dim in spec.shape)
        )

    def values(self, tensors: Sequence[runtime.Tensor]) -> Sequence[Any]:
        """The values to call the function with, given these arguments."""
        if not (self.moves or self.rest):
            return tensors
        values = [*tensors, *self.rest]
        for index, device in self.moves:
            values[index] = alias(values[index], device)
        return values

    def borrowed(self, tensors: Sequence[runtime.Tensor]) -> list[AddressRange]:
        """The memory that results must not share with the caller."""
        begins = [tensor.data_ptr() for tensor in tensors]
        return [(begin, begin + size) for begin, size in zip(begins, self.nbytes, strict=True)] + self.rest_borrowed

    def reads_address(self, address: int, tensors: Sequence[runtime.Tensor]) -> bool:
        """Return whether an address lies in these arguments' memory (or may lie in that of parameters)."""
        for tensor, size in zip(tensors, self.nbytes):  # noqa: B905 (strict=True doubles the time)
            if 0 <= address - tensor.data_ptr() < size:
                return True
        return bool(self.rest_borrowed)


class CallCache:
    """The cached calls of one function of one machine."""

    __slots__ = ("_calls", "_donated", "_mask", "_names", "_takes_arrays")

    def __init__(
        self,
        alignment: int,  # alignment in bytes, a power of two, that kernels require of tensors
        takes_arrays: bool,  # whether kernels may borrow numpy arrays
        names: tuple[str, ...] = (),  # the function's inputs
        donated: tuple[str, ...] = (),  # names of the inputs that a call consumes
    ) -> None:
        self._calls: dict[tuple[Fingerprint, ...], CachedCall] = {}
        self._mask = alignment - 1
        self._takes_arrays = takes_arrays
        self._names = names
        self._donated = tuple(map(names.index, donated))

    def in_order(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        """All arguments by position, if the named ones are exactly the inputs that follow; otherwise None."""
        expected = self._names[len(args) : len(args) + len(kwargs)] if args else self._names
        if len(expected) != len(kwargs):
            return None
        try:
            named = [kwargs[name] for name in expected]
            return [*args, *named] if args else named
        except KeyError:
            return None

    def find(self, args: Sequence[Any]) -> tuple[CachedCall | None, list[runtime.Tensor]]:
        """The cached call for these arguments, or None; and the arguments as tensors.

        If None, the tensors may cover only the first arguments, with None for objects that are not tensors.
        """
        tensors: list[Any] = []
        fingerprints: list[Fingerprint] = []
        mask, takes_arrays = self._mask, self._takes_arrays
        for value in args:
            # `_tensor` and `_fingerprint`, inlined: this is the fast path of every call.
            if type(value) is _Array and takes_arrays:
                tensor: Any = from_array(value)
            else:
                tensor = value if isinstance(value, _Tensor) else self._tensor(value)
            tensors.append(tensor)
            head = _read_dltensor(tensor.__chandle__() + _HEADER_BYTES).raw if tensor is not None else _MISALIGNED
            if head[0] & mask or head[40:] != _NO_OFFSET or not tensor.is_contiguous():
                return None, tensors
            fingerprints.append((head[8:24], tensor.shape))
        call = self._calls.get(tuple(fingerprints))
        if call is not None and self._donated and not self._may_consume(args, tensors, call):
            return None, tensors
        return call, tensors

    def _may_consume(self, args: Sequence[Any], tensors: Sequence[runtime.Tensor], call: CachedCall) -> bool:
        """Return whether each donated argument is writable and shares no memory with other arguments."""
        for index in self._donated:
            if isinstance(args[index], np.ndarray) and not args[index].flags.writeable:
                return False
        # Sorted by address: linear in the number of arguments, which is large for caches of many layers.
        begins = [tensor.data_ptr() for tensor in tensors]
        ranges = [
            (begin, begin + size, not is_borrowed)
            for begin, size, is_borrowed in zip(begins, call.sizes, call.nbytes, strict=True)
        ]
        ranges += [(begin, end, False) for begin, end in call.rest_borrowed]
        ranges.sort()
        max_end = max_donated_end = 0
        for begin, end, is_donated in ranges:
            if begin < (max_end if is_donated else max_donated_end) and end > begin:
                return False
            if end > max_end:
                max_end = end
            if is_donated and end > max_donated_end:
                max_donated_end = end
        return True

    def remember(
        self,
        args: Sequence[Any],  # the caller's arguments, all by position
        values: Sequence[Any],  # arguments as the function takes them, followed by the parameters placed before
        dims: DimValues,  # the values of symbolic dimensions
        borrowed: list[AddressRange],  # address ranges of those parameters
    ) -> None:
        """Cache a checked call, if all its arguments were borrowed."""
        fingerprints: list[Fingerprint] = []
        moves: list[tuple[int, runtime.Device]] = []
        sizes: list[int] = []
        for index, (arg, value) in enumerate(zip(args, values, strict=False)):
            tensor: Any = arg if isinstance(arg, _Tensor) else self._tensor(arg)
            fingerprint = None if tensor is None else self._fingerprint(tensor)
            if fingerprint is None or not isinstance(value, _Tensor) or value.data_ptr() != tensor.data_ptr():
                return
            if tensor.numel() == 0:
                return  # equal addresses prove nothing, and some empty tensors have strides that kernels refuse
            source, target = tensor.__dlpack_device__(), value.__dlpack_device__()
            fingerprints.append(fingerprint)
            sizes.append(nbytes_of(tensor))
            if source != target:
                moves.append((index, value.device))
        if len(self._calls) >= MAX_CACHED_CALLS:
            self._calls.clear()
        nbytes = tuple(0 if index in self._donated else size for index, size in enumerate(sizes))
        rest = tuple(values[len(args) :])
        self._calls[tuple(fingerprints)] = CachedCall(nbytes, tuple(sizes), tuple(moves), rest, borrowed, dims)

    def out_fingerprint(self, out: Any) -> tuple[Fingerprint, runtime.Tensor] | None:
        """A result buffer's fingerprint, and the buffer as a tensor; None unless it is one writable buffer."""
        if type(out) is np.ndarray and not out.flags.writeable:
            return None
        tensor = out if isinstance(out, _Tensor) else _as_tensor(out)
        fingerprint = None if tensor is None else self._fingerprint(tensor)
        return None if fingerprint is None else (fingerprint, tensor)

    def _tensor(self, value: Any) -> runtime.Tensor | None:
        return None if isinstance(value, np.ndarray) and not self._takes_arrays else _as_tensor(value)

    def _fingerprint(self, tensor: runtime.Tensor) -> Fingerprint | None:
        head: bytes = _read_dltensor(tensor.__chandle__() + _HEADER_BYTES).raw
        if head[0] & self._mask or head[40:] != _NO_OFFSET or not tensor.is_contiguous():
            return None
        return head[8:24], tensor.shape


def _as_tensor(value: Any) -> runtime.Tensor | None:
    """A tensor over the memory of an array or a DLPack object; None for anything else."""
    if type(value) is np.ndarray:
        return from_array(value)
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return None
    try:
        return from_dlpack(value)
    except Exception:  # libraries raise different exceptions; the slow path reports the error
        return None
