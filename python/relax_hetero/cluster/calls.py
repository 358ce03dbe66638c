"""Calls of a cluster: their inputs as they travel, and their results as the caller gets them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import runtime

from ..artifact.signature import FunctionSignature, TensorSpec, tensors_of
from ..vm.args.argument_binding import match_names
from ..vm.args.arguments import Placement, place
from ..vm.queue.fence import Fence
from .call_plan import CallPlan, HostRun, Source, filled, opened
from .mailbox import CallEndedError
from .route import Route
from .wire import Failure, Message, copied, decode_copy, encode, fetched

_HOST = runtime.device("cpu", 0)


class ClusterCall:
    """A call on its way.

    Parameters
    ----------
    name, plan
        The function.
    values : sequence of object
        Its inputs, encoded.
    fence : Fence
        Gets the result.
    retries : int
        How often it may begin again after a host died.

    Attributes
    ----------
    since, begun
        When it began to wait for a replica, and when it was sent to one; ``time.monotonic``.
    sent : list of object
        References to inputs in the object store, kept until it has ended.
    """

    def __init__(self, name: str, plan: CallPlan, values: Sequence[Any], fence: Fence, retries: int) -> None:
        self.name, self.plan, self.values, self.fence, self.retries = name, plan, list(values), fence, retries
        self.since = self.sent_at = time.monotonic()
        self.sent: list[Any] = []

    def copy_values(self) -> None:
        """Copy inputs that lie in the caller's memory, which it may write to before they are sent."""
        self.values = [copied(value) for value in self.values]


def bind(name: str, plan: CallPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The inputs of a call, encoded, in order.

    Raises
    ------
    BindingError
        Arguments that do not fit the plan's signature, or whose number or names are not the plan's.
    """
    signature = plan.signature or named_only(name, plan.input_names)
    placed = [tensor.device for spec in signature.inputs for tensor in tensors_of(spec)]
    devices = max(placed, default=0) + 2  # and the implicit host behind them; values travel from here, wherever to
    to = Placement((_HOST,) * devices, ("global",) * devices, alignment=1, borrows_arrays=True)
    encoded: list[Any] = []
    for (value, _), spec in zip(match_names(signature, args, kwargs, {}), signature.inputs, strict=True):
        where = f"argument {spec.name!r} of {name!r}"
        if plan.signature is None and isinstance(value, bool | int | float | tuple | list | tvm_ffi.Shape):
            encoded.append(encode(value))
        else:
            encoded += map(encode, opened(place(value, spec, where, to), spec))
    to.dims.settle()
    return encoded + [tuple(to.dims.values[size] for size in sizes) for sizes in plan.sizes]


def result_of(call: ClusterCall, route: Route, messages: Sequence[Message], get: Any) -> Any:
    """A call's result: tensors of TVM on the host, in memory of their own.

    Parameters
    ----------
    messages : sequence of Message
        Messages of the route's exits, in order.
    get : object
        Reads a reference of Ray's object store.

    Raises
    ------
    HeteroError
        A step failed; the error is as it was raised there.
    """
    arrived: dict[int, list[Any]] = {}
    for slot, message in zip(route.exits, messages, strict=True):
        if isinstance(message.values, Failure):
            raise message.values.kind(message.values.message)
        arrived[slot] = fetched(message.values, get)
    places = route.gets[call.name]

    def value_of(source: Source) -> Any:
        slot, index = places[source]
        return decode_copy(arrived[slot][index] if slot in arrived else call.values[index])

    return filled(call.plan.result, value_of)


def named_only(name: str, input_names: Sequence[str]) -> FunctionSignature:
    """A signature that says nothing but names."""
    return FunctionSignature(name, tuple(TensorSpec(of, None, None, -1) for of in input_names), ())


# Calls in which hosts exchange messages, at the caller: all hosts start, and if one fails the others end.


def run_on_all_hosts(
    ray: Any, actors: Mapping[str, Any], runs: Sequence[HostRun], number: int, values: Sequence[Any]
) -> list[Any]:
    """Results of each run, or a `Failure`; raises Ray's error where an actor died."""
    references = {actors[run.host].run.remote(number, run, _read_by(run, values)): run for run in runs}
    found: dict[HostRun, Any] = {}
    error: Exception | None = None
    waiting = list(references)
    while waiting:
        (reference, *_), waiting = ray.wait(waiting, num_returns=1)
        run = references[reference]
        try:
            found[run] = ray.get(reference)
        except Exception as raised:
            error = raised
            found[run] = Failure(CallEndedError, f"host {run.host!r} died")
        if isinstance(found[run], Failure):
            for other in waiting:
                actors[references[other].host].end.remote(number, found[run].message)
    if error is not None:
        raise error
    return [found[run] for run in runs]


def result_of_runs(plan: CallPlan, found: Sequence[Any]) -> Any:
    """A call's result, in memory of its own; raises what failed first, not what failed because of it."""
    failures = sorted((each for each in found if isinstance(each, Failure)), key=lambda f: f.kind is CallEndedError)
    if failures:
        raise failures[0].kind(failures[0].message)

    def value_of(source: Source) -> Any:
        return decode_copy(found[source.step][source.index])

    return filled(plan.result, value_of)


def _read_by(run: HostRun, values: Sequence[Any]) -> list[Any]:
    """The call's inputs, but for those that a run does not read."""
    wanted = set(_indices(run.arguments))
    return [value if index in wanted else None for index, value in enumerate(values)]


def _indices(place: Any) -> list[int]:
    if isinstance(place, Source):
        return [place.index]
    return [index for each in place or () for index in _indices(each)]
