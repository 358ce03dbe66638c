"""The call cache: a call whose arguments look like those of an earlier call is not checked again.

Checking a call costs several times what the virtual machine takes to start a small kernel. All that checks depend
on is each argument's *look*: its device, element type, shape, contiguity and alignment. A call whose arguments were
taken as they are is remembered by their looks; every other call takes the long road (`place`), which also words
the errors.
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

# So many different extents are remembered for each function; a model with more takes them as it meets them.
MANY_CALLS = 256

_Tensor = tvm_ffi.core.Tensor
# A tensor object is a header (tvm/ffi/c_api.h, TVMFFIObject) and a DLTensor (dlpack.h): the pointer (8 bytes); device
# type and id, rank and element type (16); pointers to shape and strides (16); the byte offset (8).
_HEADER_BYTES = 24
_read = (ctypes.c_char * 48).from_address
_NO_OFFSET = bytes(8)
_NOTHING = b"\1" * 48


@dataclass(slots=True)
class CachedCall:
    """A call that was found to fit.

    Attributes
    ----------
    nbytes : tuple of int
        Size of each argument that results must not share memory with; 0 of one that is donated.
    sizes : tuple of int
        Size of each argument.
    moves : tuple of (int, runtime.Device)
        Arguments that kernels must see from another device id.
    rest : tuple of object
        Parameters that follow, placed before.
    rest_borrowed : list of AddressRange
        Their address ranges.
    dims : DimValues
        The values of its symbolic dimensions.
    outs : set of Fingerprint
        Looks of ``out=`` that were found to fit.
    shared : tuple of object or None
        Facts that the machine found out about these looks once (`driver.link.repeated_calls`); None before.
    round : int
        When the machine's buffer pool was told of its extents, in rounds of the pool; -1 before.
    """

    nbytes: tuple[int, ...]
    sizes: tuple[int, ...]
    moves: tuple[tuple[int, runtime.Device], ...]
    rest: tuple[Any, ...]
    rest_borrowed: list[AddressRange]
    dims: DimValues
    outs: set[Fingerprint] = field(default_factory=set)
    shared: tuple[Any, ...] | None = None
    round: int = -1

    def settles(self, signature: FunctionSignature) -> bool:
        """Return whether the arguments alone decide the shape of the function's one result."""
        if signature.output_is_tuple:
            return False
        (spec,) = signature.outputs
        known = self.dims.values.keys()
        return (
            isinstance(spec, TensorSpec)
            and spec.shape is not None
            and all(isinstance(dim, int) or parse_dim(dim).names <= known for dim in spec.shape)
        )

    def values(self, tensors: Sequence[runtime.Tensor]) -> Sequence[Any]:
        """The values to call the function with, for these arguments."""
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

    def shares(self, address: int, tensors: Sequence[runtime.Tensor]) -> bool:
        """Return whether an address is in memory of these arguments (or may be in that of parameters)."""
        for tensor, size in zip(tensors, self.nbytes):  # noqa: B905 (strict takes as long as the rest)
            if 0 <= address - tensor.data_ptr() < size:
                return True
        return bool(self.rest_borrowed)


class CallCache:
    """The known calls of one function of one machine.

    Parameters
    ----------
    alignment : int
        Alignment of tensors in bytes, a power of two, as kernels need it.
    takes_arrays : bool
        Whether numpy arrays may be lent to kernels.
    names : tuple of str
        The function's inputs.
    donated : tuple of str
        Those of them that a call consumes.
    """

    __slots__ = ("_calls", "_donated", "_mask", "_names", "_takes_arrays")

    def __init__(
        self, alignment: int, takes_arrays: bool, names: tuple[str, ...] = (), donated: tuple[str, ...] = ()
    ) -> None:
        self._calls: dict[tuple[Fingerprint, ...], CachedCall] = {}
        self._mask = alignment - 1
        self._takes_arrays = takes_arrays
        self._names = names
        self._donated = tuple(map(names.index, donated))

    def in_order(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        """All arguments by position, if those by name are the inputs that follow; else None."""
        expected = self._names[len(args) : len(args) + len(kwargs)]
        if len(expected) != len(kwargs):
            return None
        try:
            return [*args, *[kwargs[name] for name in expected]]
        except KeyError:
            return None

    def recall(self, args: Sequence[Any]) -> tuple[CachedCall | None, list[runtime.Tensor]]:
        """The known call that these arguments make, and they as tensors; None where there is none.

        Then the tensors are those of the first arguments, None for one that gives none.
        """
        tensors: list[Any] = []
        looks: list[Fingerprint] = []
        for value in args:
            tensor: Any = value if isinstance(value, _Tensor) else self._tensor(value)
            tensors.append(tensor)
            # As `_look` does, in line: this is the shortest way through the machine.
            head = _read(tensor.__chandle__() + _HEADER_BYTES).raw if tensor is not None else _NOTHING
            if head[0] & self._mask or head[40:] != _NO_OFFSET or not tensor.is_contiguous():
                return None, tensors
            looks.append((head[8:24], tensor.shape))
        call = self._calls.get(tuple(looks))
        if call is not None and self._donated and not self._may_consume(args, tensors, call):
            return None, tensors
        return call, tensors

    def _may_consume(self, args: Sequence[Any], tensors: Sequence[runtime.Tensor], call: CachedCall) -> bool:
        """Return whether each donated argument may be written and has memory of its own."""
        for index in self._donated:
            if isinstance(args[index], np.ndarray) and not args[index].flags.writeable:
                return False
        # In the order of addresses, so that a cache of many layers takes a look at each only.
        begins = [tensor.data_ptr() for tensor in tensors]
        ranges = [
            (begin, begin + size, not lent) for begin, size, lent in zip(begins, call.sizes, call.nbytes, strict=True)
        ]
        ranges += [(begin, end, False) for begin, end in call.rest_borrowed]
        ranges.sort()
        reached = reached_donated = 0
        for begin, end, is_donated in ranges:
            if begin < (reached if is_donated else reached_donated) and end > begin:
                return False
            if end > reached:
                reached = end
            if is_donated and end > reached_donated:
                reached_donated = end
        return True

    def remember(
        self, args: Sequence[Any], values: Sequence[Any], dims: DimValues, borrowed: list[AddressRange]
    ) -> None:
        """Keep a call that fits, if its arguments were taken where they are.

        Parameters
        ----------
        args : sequence of object
            Arguments of the caller, all by position.
        values : sequence of object
            Arguments as the function takes them; parameters that were placed before follow.
        dims : DimValues
            The values of symbolic dimensions.
        borrowed : list of AddressRange
            Address ranges of those parameters.
        """
        looks: list[Fingerprint] = []
        moves: list[tuple[int, runtime.Device]] = []
        sizes: list[int] = []
        for index, (arg, value) in enumerate(zip(args, values, strict=False)):
            tensor: Any = arg if isinstance(arg, _Tensor) else self._tensor(arg)
            look = None if tensor is None else self._fingerprint(tensor)
            if look is None or not isinstance(value, _Tensor) or value.data_ptr() != tensor.data_ptr():
                return
            if tensor.numel() == 0:
                return  # the same address says nothing, and some such tensors have strides that kernels refuse
            here, there = tensor.__dlpack_device__(), value.__dlpack_device__()
            looks.append(look)
            sizes.append(nbytes_of(tensor))
            if here != there:
                moves.append((index, value.device))
        if len(self._calls) >= MANY_CALLS:
            self._calls.clear()
        nbytes = tuple(0 if index in self._donated else size for index, size in enumerate(sizes))
        rest = tuple(values[len(args) :])
        self._calls[tuple(looks)] = CachedCall(nbytes, tuple(sizes), tuple(moves), rest, borrowed, dims)

    def out_fingerprint(self, out: Any) -> tuple[Fingerprint, runtime.Tensor] | None:
        """A result buffer's look, and the buffer as a tensor; None for what is no single writable one."""
        if type(out) is np.ndarray and not out.flags.writeable:
            return None
        tensor = out if isinstance(out, _Tensor) else _as_tensor(out)
        look = None if tensor is None else self._fingerprint(tensor)
        return None if look is None else (look, tensor)

    def _tensor(self, value: Any) -> runtime.Tensor | None:
        return None if isinstance(value, np.ndarray) and not self._takes_arrays else _as_tensor(value)

    def _fingerprint(self, tensor: runtime.Tensor) -> Fingerprint | None:
        head: bytes = _read(tensor.__chandle__() + _HEADER_BYTES).raw
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
    except Exception:  # each library raises its own; the long road asks again, and words the error
        return None
