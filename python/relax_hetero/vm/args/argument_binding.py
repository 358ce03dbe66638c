"""Binding of arguments: a checked and placed value for each input, from positions, names and earlier parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tvm import runtime

from ...artifact.dims import DimValues
from ...artifact.messages import unknown_name
from ...artifact.signature import FunctionSignature, ObjectSpec, ShapeSpec, TupleSpec
from ...errors import BindingError
from ..device.memory_limit import MemoryLimits
from ..device.tensors import AddressRange, address_ranges
from ..file.executable import Executable
from .arguments import Placement, place
from .call_cache import CachedCall, CallCache
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
        then each gets memory of its own. Raises BindingError: arguments that do not fit. Raises MemoryLimitError: sizes
        that need more memory than the machine may take.
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

    Raises BindingError: too many, too few, unknown or repeated arguments.
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

    Raises BindingError: other types, or a name that none of the functions has.
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
