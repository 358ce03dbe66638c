"""Calls of a cluster: their inputs as they travel, and their results as the caller gets them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi

from ..artifact.dims import DimValues
from ..artifact.signature import FunctionSignature, ShapeSpec, TensorSpec, TupleSpec, ValueSpec
from ..errors import BindingError
from ..vm.args.argument_binding import match_names
from ..vm.args.arguments import as_tensor, check_tensor
from ..vm.device.tensors import dtype_name
from ..vm.queue.fence import Fence
from .call_plan import CallPlan, Source, filled
from .route import Route
from .wire import Failure, Message, decode_own, encode, fetched


class ClusterCall:
    """A call on its way.

    Parameters
    ----------
    name, plan: The function.
    values: Its inputs, encoded.
    fence: Gets the result.
    retries: How often it may begin again after a host died.

    Attributes
    ----------
    since, begun: When it began to wait for a replica, and when it was sent to one; ``time.monotonic``.
    sent: References to inputs in the object store, kept until it has ended.
    """

    def __init__(self, name: str, plan: CallPlan, values: Sequence[Any], fence: Fence, retries: int) -> None:
        self.name, self.plan, self.values, self.fence, self.retries = name, plan, list(values), fence, retries
        self.since = self.begun = time.monotonic()
        self.sent: list[Any] = []

    def own(self) -> None:
        """Copy inputs that lie in the caller's memory, which it may write to before they are sent."""
        self.values = [value.copy() if isinstance(value, np.ndarray) else value for value in self.values]


def bind(name: str, plan: CallPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The inputs of a call, encoded, in order.

    Raises
    ------
    BindingError: Arguments that do not fit the plan's signature, or whose number or names are not the plan's.
    """
    signature = plan.signature or _named(name, plan.input_names)
    dims = DimValues()
    values = [value for value, _ in match_names(signature, args, kwargs, {})]
    specs = signature.inputs
    encoded: list[Any] = []
    for value, spec in zip(values, specs, strict=True):
        encoded += _bound(value, spec, f"argument {spec.name!r} of {name!r}", dims if plan.signature else None)
    if plan.signature:
        dims.settle()
    return encoded + [tuple(dims.values[size] for size in sizes) for sizes in plan.sizes]


def result_of(call: ClusterCall, route: Route, messages: Sequence[Message], get: Any) -> Any:
    """A call's result: tensors of TVM on the host, in memory of their own.

    Parameters
    ----------
    messages: Of the route's exits, in order.
    get: Reads a reference of Ray's object store.

    Raises
    ------
    HeteroError: What failed in a step, as it was raised there.
    """
    arrived: dict[int, list[Any]] = {}
    for slot, message in zip(route.exits, messages, strict=True):
        if isinstance(message.values, Failure):
            raise message.values.kind(message.values.message)
        arrived[slot] = fetched(message.values, get)
    places = route.gets[call.name]

    def value_of(source: Source) -> Any:
        slot, index = places[source]
        return decode_own(arrived[slot][index] if slot in arrived else call.values[index])

    return filled(call.plan.result, value_of)


def _named(name: str, input_names: Sequence[str]) -> FunctionSignature:
    """A signature that says nothing but names."""
    return FunctionSignature(name, tuple(TensorSpec(of, None, None, -1) for of in input_names), ())


def _bound(value: Any, spec: ValueSpec, where: str, dims: DimValues | None) -> list[Any]:
    """A checked argument as it travels, tuples opened."""
    if isinstance(spec, TupleSpec):
        if not isinstance(value, tuple | list) or len(value) != len(spec.fields):
            raise BindingError(f"{where} is {type(value).__name__}, expected a tuple of {len(spec.fields)} values")
        return [
            each
            for index, (part, field) in enumerate(zip(value, spec.fields, strict=True))
            for each in _bound(part, field, f"{where}, field {index},", dims)
        ]
    if isinstance(spec, ShapeSpec):
        return [_bound_shape(value, spec, where, dims)]
    if not isinstance(spec, TensorSpec) or isinstance(value, bool | int | float | tuple | list | tvm_ffi.Shape):
        return [encode(value)]
    if isinstance(value, np.ma.MaskedArray):
        raise BindingError(f"{where} is a masked array, whose mask would be lost; expected a tensor")
    if not isinstance(value, np.ndarray | np.generic):
        value = as_tensor(value, where, spec)
    if dims is not None:
        dtype = dtype_name(value.dtype) if isinstance(value, np.ndarray | np.generic) else str(value.dtype)
        check_tensor(dtype, value.shape, spec, where, dims)
    return [encode(value)]


def _bound_shape(value: Any, spec: ShapeSpec, where: str, dims: DimValues | None) -> tuple[int, ...]:
    if not isinstance(value, tuple | list | tvm_ffi.Shape):
        raise BindingError(f"{where} is {type(value).__name__}, expected a shape: a tuple of integers")
    shape = tuple(int(extent) for extent in value)
    if spec.ndim >= 0 and len(shape) != spec.ndim:
        raise BindingError(f"{where} has {len(shape)} dimensions, expected {spec.ndim}")
    if dims is not None and spec.values is not None:
        for axis, (dim, extent) in enumerate(zip(spec.values, shape, strict=True)):
            dims.match(dim, extent, where, axis)
    return shape
