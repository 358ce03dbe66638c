"""Calls of a cluster: their inputs as they travel, and their results as the caller gets them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi

from ..artifact.dims import DimValues
from ..artifact.signature import FunctionSignature, TensorSpec
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
    since: When it began to wait for a replica; ``time.monotonic``.
    sent: References to inputs in the object store, kept until it has ended.
    """

    def __init__(self, name: str, plan: CallPlan, values: Sequence[Any], fence: Fence, retries: int) -> None:
        self.name, self.plan, self.values, self.fence, self.retries = name, plan, list(values), fence, retries
        self.since = time.monotonic()
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
    encoded = [
        _bound(value, spec, f"argument {spec.name!r} of {name!r}", dims if plan.signature else None)
        for value, spec in zip(values, specs, strict=True)
    ]
    if plan.signature:
        dims.settle()
    return encoded


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


def _bound(value: Any, spec: Any, where: str, dims: DimValues | None) -> Any:
    if not isinstance(spec, TensorSpec) or isinstance(value, bool | int | float | tuple | list | tvm_ffi.Shape):
        return encode(value)
    if isinstance(value, np.ma.MaskedArray):
        raise BindingError(f"{where} is a masked array, whose mask would be lost; expected a tensor")
    if not isinstance(value, np.ndarray | np.generic):
        value = as_tensor(value, where, spec)
    if dims is not None:
        dtype = dtype_name(value.dtype) if isinstance(value, np.ndarray | np.generic) else str(value.dtype)
        check_tensor(dtype, value.shape, spec, where, dims)
    return encode(value)
