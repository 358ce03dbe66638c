"""Calls of a cluster: encoding of inputs, and decoding of results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ..artifact.dims import DimValues
from ..artifact.signature import FunctionSignature, TensorSpec, tensors_of
from ..vm.args.argument_binding import match_names
from ..vm.args.arguments import Placement, check_tensor, place
from ..vm.device.tensors import dtype_name
from ..vm.queue.fence import Fence
from .call_plan import CallPlan, HostRun, Source, flatten_value, substitute
from .mailbox import CallEndedError
from .route import Route
from .wire import Failure, Message, copy_value, decode_copy, decode_received, encode, is_plain

_HOST = runtime.device("cpu", 0)


class ClusterCall:
    """A submitted call."""

    def __init__(
        self,
        name: str,  # name of the function
        plan: CallPlan,  # its plan
        values: Sequence[Any],  # encoded inputs
        fence: Fence,  # gets the result
        retries: int,  # number of retries after a host died
    ) -> None:
        self.name, self.plan, self.values, self.fence, self.retries = name, plan, list(values), fence, retries
        self.waiting_since = time.monotonic()  # time at which it began to wait for a replica (``time.monotonic``)

    def copy_values(self) -> None:
        """Copy inputs, since the caller may change its arrays before they are sent."""
        self.values = [copy_value(value) for value in self.values]


def bind(name: str, plan: CallPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Check and encode the inputs of a call. Raises BindingError if arguments do not match the plan's signature."""
    signature = plan.signature or untyped_signature(name, plan.input_names)
    dims = DimValues()
    encoded: list[Any] = []
    for (value, _), spec in zip(match_names(signature, args, kwargs, {}), signature.inputs, strict=True):
        where = f"argument {spec.name!r} of {name!r}"
        if isinstance(spec, TensorSpec) and type(value) is np.ndarray and is_plain(value):
            check_tensor(dtype_name(value.dtype), value.shape, spec, where, dims)
            encoded.append(value)
        elif plan.signature is None and isinstance(value, bool | int | float | tuple | list | tvm_ffi.Shape):
            encoded.append(encode(value))
        else:
            # All devices, and the implicit host, are this CPU, which sends the values.
            devices = max((tensor.device for tensor in tensors_of(spec)), default=-1) + 2
            placement = Placement((_HOST,) * devices, ("global",) * devices, dims, alignment=1, borrows_arrays=True)
            encoded += map(encode, flatten_value(place(value, spec, where, placement), spec))
    dims.settle()
    return encoded + [tuple(dims.values[size] for size in sizes) for sizes in plan.sizes]


def result_of(call: ClusterCall, route: Route, messages: Sequence[Message]) -> Any:
    """Decode a call's result as TVM tensors on the CPU, in memory of their own.

    `call`: call that has ended; `route`: route of its function; `messages`: messages of the route's exits, in order.
    Raises the error of a step that failed, a HeteroError.
    """
    received: dict[int, tuple[Any, ...]] = {}
    for task, message in zip(route.exits, messages, strict=True):
        if isinstance(message.values, Failure):
            raise message.values.kind(message.values.message)
        received[task] = message.values
    results, returned = route.results[call.name], set[Source]()

    def value_of(source: Source) -> Any:
        task, index = results[source]
        if task not in received:
            return decode_copy(call.values[index])
        decode = decode_copy if source in returned else decode_received
        returned.add(source)
        return decode(received[task][index])

    return substitute(call.plan.result, value_of)


@cache
def untyped_signature(name: str, input_names: tuple[str, ...]) -> FunctionSignature:
    """Make a signature that has only names of inputs."""
    return FunctionSignature(name, tuple(TensorSpec(each, None, None, -1) for each in input_names), ())


def run_on_all_hosts(
    ray: Any, actors: Mapping[str, Any], runs: Sequence[HostRun], number: int, values: Sequence[Any]
) -> list[Any]:
    """Run the parts of a function that exchange messages; if one fails, the others are ended.

    Returns a result or a `Failure` for each run; raises Ray's error if an actor died.
    """
    references = {actors[run.host].run.remote(number, run, _inputs_of(run, values)): run for run in runs}
    results: dict[HostRun, Any] = {}
    error: Exception | None = None
    waiting = list(references)
    while waiting:
        (reference, *_), waiting = ray.wait(waiting, num_returns=1)
        run = references[reference]
        try:
            results[run] = ray.get(reference)
        except Exception as raised:
            error = raised
            results[run] = Failure(CallEndedError, f"host {run.host!r} died")
        if isinstance(results[run], Failure):
            for other in waiting:
                actors[references[other].host].end.remote(number, results[run].message)
    if error is not None:
        raise error
    return [results[run] for run in runs]


def result_of_runs(plan: CallPlan, results: Sequence[Any]) -> Any:
    """Decode a call's result, in memory of its own; raises the first failure, not its consequences."""
    failures = sorted((each for each in results if isinstance(each, Failure)), key=lambda f: f.kind is CallEndedError)
    if failures:
        raise failures[0].kind(failures[0].message)

    return substitute(plan.result, lambda source: decode_copy(results[source.step][source.index]))


def _inputs_of(run: HostRun, values: Sequence[Any]) -> list[Any]:
    """Inputs of the call, with None in place of those that a run does not read."""
    read = set(_indices(run.arguments))
    return [value if index in read else None for index, value in enumerate(values)]


def _indices(argument: Any) -> list[int]:
    if isinstance(argument, Source):
        return [argument.index]
    return [index for each in argument or () for index in _indices(each)]
