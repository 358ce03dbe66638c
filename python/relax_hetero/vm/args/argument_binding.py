"""Binding of arguments: a checked and placed value for each input, from positions, names and earlier parameters.

The call cache: a call whose arguments have the fingerprints of an earlier call is not checked again.

Checking a call costs several times as much as starting a small kernel. Checks depend only on each argument's
*fingerprint*: its device, element type, shape, contiguity and alignment. A call whose arguments were all borrowed is
cached by their fingerprints; every other call takes the slow path (`place`), which also reports errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.dims import DimValues, parse_dim
from ...artifact.messages import unknown_name
from ...artifact.signature import FunctionSignature, ObjectSpec, ShapeSpec, TensorSpec, TupleSpec
from ...errors import BindingError
from ..device.memory_limit import MemoryLimits
from ..device.tensors import AddressRange, address_ranges, alias, from_array, nbytes_of
from ..file.executable import Executable
from .arguments import Placement, from_dlpack, place
from .donated_arguments import check_donated


class BoundArguments(NamedTuple):
    """The checked arguments of a call."""

    values: Sequence[Any]  # arguments as the function takes them
    dims: DimValues  # the values of its symbolic dimensions
    borrowed: list[AddressRange]  # address ranges of the caller's memory that results must not share


class ArgumentBinder:
    """Binds the arguments and parameters of a machine's functions; not thread-safe."""

    def __init__(
        self,
        executable: Executable,
        devices: Sequence[runtime.Device],  # devices by manifest index; the last is the host
        scopes: Sequence[str],  # the memory scope of each
        limits: MemoryLimits | None = None,  # limits for calls with symbolic sizes
    ) -> None:
        self.caches: dict[str, CallCache] = {}  # accepted calls of each function
        self._executable, self._devices, self._scopes, self._limits = executable, devices, scopes, limits
        self._params: dict[str, tuple[dict[int, Any], DimValues, list[AddressRange]]] = {}
        self._bounds = {memory.name: memory.upper_bounds for memory in executable.metadata.memory}

    def set_params(self, params: Mapping[str, Any] | Sequence[Any], function: str | None) -> None:
        """Place parameters for all later calls; see `VirtualMachine.set_params`."""
        names = self._executable.function_names if function is None else [function]
        signatures = [self._executable.signature(name) for name in names]
        takers = [signature for signature in signatures if function or signature.num_input < len(signature.inputs)]
        if not takers:
            takers = signatures[:1]  # for the error message that it takes no parameters
        named = shared_params(params, takers)
        placed = [(signature.name, *self._place_params(signature, named)) for signature in takers]
        for name, values, dims in placed:
            self._params[name] = (values, dims, address_ranges(values.values()))
            self.caches.pop(name, None)

    def _place_params(self, signature: FunctionSignature, named: dict[str, Any]) -> tuple[dict[int, Any], DimValues]:
        """The parameters of one function; `named` gets the placed tensors, which other functions then share."""
        values = dict(self._params.get(signature.name, ({}, None, None))[0])
        to = Placement(self._devices, self._scopes, keep=True)
        for index, spec in list(enumerate(signature.inputs))[signature.num_input :]:
            where = f"parameter {spec.name!r} of {signature.name!r}"
            if spec.name in named:
                values[index] = named[spec.name] = place(named[spec.name], spec, where, to)
            elif index in values:  # again, for its symbolic dimensions
                place(values[index], spec, where, to)
        to.dims.settle()
        return values, to.dims

    def find_cached(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[CallCache, Sequence[Any] | None, CachedCall | None, list[runtime.Tensor]]:
        """Look for an earlier call with arguments that look the same.

        Returns the function's cache; all arguments by position, or None if names prevent it; the earlier call, or None;
        and the arguments as tensors. Without an earlier call, the arguments by position have tensors in place of
        foreign objects, so that each object is asked for its memory once.
        """
        if type(args) is not tuple or (kwargs and type(kwargs) is not dict):
            _check_call(name, args, kwargs)
        cache = self.caches.get(name) or self._new_cache(name)
        ordered = cache.in_order(args, kwargs) if kwargs else args
        if ordered is None:
            return cache, None, None, []
        call, tensors = cache.find(ordered)
        if call is None:
            converted = [
                value if tensor is None or isinstance(value, np.ndarray) else tensor
                for value, tensor in zip(ordered, tensors, strict=False)
            ]
            ordered = [*converted, *ordered[len(converted) :]]
        return cache, ordered, call, tensors

    def bind_uncached(
        self, name: str, cache: CallCache, ordered: Sequence[Any] | None, args: Sequence[Any], kwargs: Any
    ) -> BoundArguments:
        """`bind` after `find_cached`, whose first two results are `cache` and `ordered`; the call is cached."""
        if ordered is not None:
            args, kwargs = ordered, {}
        bound = self.bind(self._executable.signature(name), args, kwargs, keep=False)
        needs_no_check = self._limits is None or not bound.dims.values  # memory limits depend on extents
        if ordered is not None and needs_no_check:
            _, _, params_borrowed = self._params.get(name, ({}, None, []))
            cache.remember(ordered, bound.values, bound.dims, params_borrowed)
        return bound

    def _new_cache(self, name: str) -> CallCache:
        metadata, signature = self._executable.metadata, self._executable.signature(name)
        cache = self.caches[name] = CallCache(
            metadata.alignment, not metadata.writes_arguments, signature.input_names, signature.donated
        )
        return cache

    def bind(
        self, signature: FunctionSignature, args: Sequence[Any], kwargs: Mapping[str, Any], keep: bool
    ) -> BoundArguments:
        """Check arguments, and place them on their parameters' devices.

        `args`, `kwargs`: the caller's arguments by position and by name. `keep`: whether they serve later calls, too:
        then each gets memory of its own. Raises BindingError for arguments that do not fit. Raises MemoryLimitError for
        sizes that need more memory than the machine may take.
        """
        params, dims, borrowed = self._params.get(signature.name, ({}, DimValues(), []))
        metadata = self._executable.metadata
        matches = match_names(signature, args, kwargs, params)
        replaces_params = any(index in params and not placed for index, (_, placed) in enumerate(matches))
        placement = Placement(
            self._devices,
            self._scopes,
            DimValues() if replaces_params else dims.copy(),
            keep,
            metadata.alignment,
            not (keep or metadata.writes_arguments),
            [*borrowed],
        )
        values = []
        for spec, (value, placed) in zip(signature.inputs, matches, strict=True):
            placement.donates, placement.copies = spec.name in signature.donated, spec.name in signature.copied
            where = f"argument {spec.name!r} of {signature.name!r}"
            stays = placed and not placement.copies and not replaces_params
            values.append(value if stays else place(value, spec, where, placement))
        placement.dims.settle()
        placement.dims.check_bounds(self._bounds.get(signature.name, {}))
        if self._limits is not None:
            self._limits.admit(signature.name, placement.dims.values)
        if signature.donated:
            check_donated(signature, values)
        return BoundArguments(values, placement.dims, placement.borrowed)


def _check_call(name: str, args: object, kwargs: object) -> None:
    """Require a sequence of positional arguments and a mapping of named ones; BindingError otherwise."""
    if not isinstance(args, Sequence | np.ndarray) or isinstance(args, str | bytes):
        raise BindingError(f"the arguments of {name!r} are a {type(args).__name__}, expected a tuple or a list")
    if not isinstance(kwargs, Mapping | None):
        kind = type(kwargs).__name__
        raise BindingError(f"the arguments of {name!r} by name are a {kind}, expected a dict from names to values")


def match_names(
    signature: FunctionSignature,  # signature of the function
    # args, kwargs: arguments of this call.
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Mapping[int, Any],  # parameters that were placed before, by input index
) -> list[tuple[Any, bool]]:
    """A pair (value, whether it is already placed) per input, from positions, names and earlier parameters.

    Raises BindingError for too many, too few, unknown or repeated arguments.
    """
    names = signature.input_names
    hint = "" if kwargs else _packed_hint(signature, args)
    if hint:
        raise BindingError(f"{signature.name!r} takes {_count(signature)}, found {hint}")
    if len(args) == len(names) and not kwargs:
        return [(value, False) for value in args]
    if len(args) > len(names):
        raise BindingError(f"{signature.name!r} takes {_count(signature)}, found {len(args)}: {signature}")
    values: dict[int, Any] = dict(enumerate(args))
    for name, value in kwargs.items():
        if name not in names:
            raise unknown_name("input", name, names, f"function {signature.name!r}")
        index = names.index(name)
        if index in values:
            raise BindingError(f"{signature.name!r}: input {name!r} is given by position and by name")
        values[index] = value
    missing = [name for i, name in enumerate(names) if i not in values and i not in given]
    if missing:
        parameters = set(names[signature.num_input :])
        unset = ", ".join(repr(name) for name in missing if name in parameters)
        hint = f"; {unset}: parameters that set_params gives once" if unset else ""
        raise BindingError(
            f"{signature.name!r} takes {_count(signature)}, found {len(values)}: "
            f"{', '.join(map(repr, missing))} missing{hint}"
        )
    return [(values[i], False) if i in values else (given[i], True) for i in range(len(names))]


def _packed_hint(signature: FunctionSignature, args: Sequence[Any]) -> str:
    """Advice if all arguments were passed as one container; otherwise empty."""
    if len(args) != 1 or not signature.inputs or isinstance(signature.inputs[0], TupleSpec | ShapeSpec | ObjectSpec):
        return ""
    (value,) = args
    if isinstance(value, Mapping):
        return f'one {type(value).__name__}: write vm["{signature.name}"](**inputs) to give its values by name'
    if isinstance(value, (list, tuple)) and len(signature.inputs) > 1 and len(value) == len(signature.inputs):
        return (
            f'one {type(value).__name__} of {len(value)}: write vm["{signature.name}"](*inputs) to give them one by one'
        )
    return ""


def shared_params(params: Mapping[str, Any] | Sequence[Any], signatures: Sequence[FunctionSignature]) -> dict[str, Any]:
    """Parameters of several functions by name, from a mapping of some or a sequence of all.

    Raises BindingError for other types, or a name that none of the functions has.
    """
    functions = " and ".join(repr(signature.name) for signature in signatures)
    lists = [signature.input_names[signature.num_input :] for signature in signatures]
    if not isinstance(params, Mapping):
        if not isinstance(params, Sequence) or isinstance(params, str | bytes):
            kind = type(params).__name__
            raise BindingError(f"the parameters of {functions} are a {kind}, expected a mapping or a sequence")
        if len(set(lists)) > 1:
            raise BindingError(f"{functions} take different parameters, found a sequence, expected a mapping by name")
        names = lists[0] if lists else ()
        if len(params) != len(names):
            raise BindingError(f"{functions} takes {len(names)} parameters, found {len(params)}: {list(names)}")
        return dict(zip(names, params, strict=True))
    all_names = tuple(dict.fromkeys(name for names in lists for name in names))
    for name in params:
        if name not in all_names:
            raise unknown_name("parameter", name, all_names, f"function {functions}")
    return dict(params)


def _count(signature: FunctionSignature) -> str:
    inputs, params = signature.num_input, len(signature.inputs) - signature.num_input
    return f"{inputs} input{'s' * (inputs != 1)}" + (f" and {params} parameters" if params else "")


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
    is_plain: bool = False  # whether `shared` is computed, and calls need only it and the arguments
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
