"""Checks of metadata from a file: types, and the validity of all indices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .commands import ARENA, DIRECT, SLOT, Copy, Dispatch, Fill, Reference, RegionSpec
from .metadata import DeviceSpec, Metadata
from .model_graph import check_graph, expect
from .schedule import Schedule
from .signature import FunctionSignature, TensorSpec, tensors_of
from .typed_data import check_types, read_json

# Schemas of the reports in metadata (JSON data), for the fields that ``explain`` reads.

_SIZE = (int, str)
_BINDING = {"function": str, "variable": str}

_PLACEMENT = [
    {**_BINDING, "op": str, "device": str, "device_index": int, "reason": str, "bytes": (int, None), "kind": str}
]
_FUSIONS = {
    "dispatches": [{**_BINDING, "kernel": str, "device": str, "ops": [str], "precision": str}],
    "missed": [{**_BINDING, "op": str, "reason": str}],
}
_OPERAND = {
    **dict.fromkeys(("role", "variable", "shape", "dtype", "encoding", "layout", "packed"), str),
    "bytes_before": _SIZE,
    "bytes_after": _SIZE,
}
_ENCODINGS = {
    "ops": [{**_BINDING, "op": str, "device": str, "kernel": str, "operands": [_OPERAND], "epilogue": str}],
    "transfers": [
        {**_BINDING, "source": str, "destination": str, "layout": str, "bytes": _SIZE, "relayout": str},
    ],
    "cancelled": [{**_BINDING, "op": str, "device": str, "reason": str}],
}
_ESTIMATE = {"objective": str, "seconds": (int, float), "busy_seconds": {"*": (int, float)}}

FORMS = {
    "placement": (_PLACEMENT, None),
    "fusions": (_FUSIONS, None),
    "encodings": (_ENCODINGS, None),
    "placement_estimate": (_ESTIMATE, None),
}
"""Schema of the report in each field of the metadata: a type, a tuple of alternatives, ``[schema]`` for a list, or a
dict of required keys, where ``"*"`` stands for every key."""


def mismatch(data: Any, form: Any, where: str) -> str:
    """Message about the first difference of data from its schema; empty if there is none."""
    message = _difference(data, form)
    return message and where + message


def _difference(data: Any, form: Any) -> str:
    """The first difference of data from its schema: where it is in the data, and what is wrong."""
    if isinstance(form, tuple):
        messages = [_difference(data, option) for option in form]
        # The alternative of the same JSON type gives the most specific message.
        specific = (message for message, option in zip(messages, form, strict=True) if _is_like(data, option))
        return "" if "" in messages else next(specific, messages[0])
    if isinstance(form, list):
        if not isinstance(data, list):
            return _wrong(data, "a list")
        wrong = ((i, _difference(entry, form[0])) for i, entry in enumerate(data))
        return next((f"[{i}]{message}" for i, message in wrong if message), "")
    if isinstance(form, dict):
        if not isinstance(data, dict):
            return _wrong(data, "an object")
        keys = data.keys() if "*" in form else form.keys()
        if not keys <= data.keys():
            return f" lacks {', '.join(sorted(keys - data.keys()))}"
        wrong = ((key, _difference(data[key], form.get(key, form.get("*")))) for key in keys)
        return next((f".{key}{message}" for key, message in wrong if message), "")
    if form is None:
        return "" if data is None else _wrong(data, "null")
    is_number = form in (int, float) and type(data) is form and abs(data) < 2**63
    return "" if is_number or (form is str and type(data) is str) else _wrong(data, form.__name__)


def _is_like(data: Any, form: Any) -> bool:
    return isinstance(data, type(form)) and isinstance(form, (list, dict))


def _wrong(data: Any, expected: str) -> str:
    return f" is a {type(data).__name__}, expected {expected}"


def read_metadata(text: str) -> Metadata:
    """Parse and check metadata from a file; ValueError for invalid text."""
    try:
        metadata = Metadata.from_json(text)
    except (AttributeError, KeyError, IndexError, RecursionError, TypeError) as error:
        raise ValueError(f"a part of it is missing, or of another kind: {error!r}"[:300]) from error
    check_metadata(metadata)
    return metadata


def check_metadata(metadata: Metadata) -> None:
    """Refuse metadata with references to absent devices, constants, kernels, slots or values.

    Raises ValueError for the first invalid reference.
    """
    check_types(metadata)
    for name, form in FORMS.items():
        wrong = mismatch(getattr(metadata, name), form, name)
        if wrong:
            raise ValueError(wrong)
    for device in metadata.devices:
        _check_device(device)
    devices = range(-1, len(metadata.devices))
    expect(metadata.host_index, devices, "host_index")
    _expect_all(metadata.optional, range(len(metadata.devices)), "an optional device")
    if metadata.alignment < 1 or metadata.alignment & (metadata.alignment - 1):
        raise ValueError(f"alignment is {metadata.alignment}, expected a power of two")
    for constant in metadata.constants:
        where = f"constant {constant.name!r}"
        expect(constant.device, devices, f"the device of {where}")
        if any(size < 0 for size in constant.shape):
            raise ValueError(f"{where} has the shape {list(constant.shape)}, expected sizes >= 0")
        indices = [entry for entry in constant.addresses or () if isinstance(entry, int)]
        _expect_all(indices, range(len(metadata.constants)), f"an address of {where}")
    for symbol, dispatch in metadata.dispatches.items():
        _expect_all(dispatch.devices, devices, f"a device of kernel {symbol!r}")
    for kernel in metadata.kernels.values():
        expect(kernel.device, devices, f"the device of kernel {kernel.name!r}")
        expect(kernel.workgroups, range(len(kernel.scalars) + 1), f"the workgroups of kernel {kernel.name!r}")
    for signature in metadata.signatures.values():
        _check_signature(signature, devices, range(len(metadata.constants)))
    for call in metadata.repeated:
        repeated = metadata.signatures.get(call.function)
        if repeated is None or not all(isinstance(spec, TensorSpec) for spec in repeated.inputs):
            raise ValueError(f"calls of {call.function!r} are repeated, which is no function of tensors that is there")
    if metadata.graph is not None:
        check_graph(metadata.graph)
    _check_kernel_nodes(metadata)
    for region in metadata.regions:
        _check_region(region, metadata)
    for schedule in metadata.schedules:
        _check_schedule(schedule, devices)
    for memory in metadata.memory:
        where = f"the memory of {memory.name!r}"
        _expect_all((storage.device for storage in memory.storages), devices, f"a device in {where}")
        _expect_all((live.storage for live in memory.tensors), range(len(memory.storages)), f"a storage in {where}")
        slots = (slot for step in memory.regions for slot in step.slots)
        _expect_all(slots, range(-1, len(memory.tensors)), f"a tensor in {where}")


def _check_kernel_nodes(metadata: Metadata) -> None:
    """Check the graph nodes of kernel calls; executables of earlier versions have none."""
    functions = metadata.graph.functions if metadata.graph is not None else ()
    counts = {function.name: len(function.nodes) for function in functions}
    for entry in (metadata.fusions or {}).get("dispatches", ()):
        nodes, where = entry.get("nodes", []), f"kernel {entry['kernel']!r}"
        if not isinstance(nodes, list) or any(type(node) is not int for node in nodes):
            raise ValueError(f"the nodes of {where} are {str(nodes)[:100]}, expected a list of numbers")
        _expect_all(nodes, range(counts.get(entry["function"], 0)), f"a node of {where}")


def _check_device(device: DeviceSpec) -> None:
    target = read_json(device.target)
    kind = target.get("kind") if isinstance(target, dict) else target
    cores = target.get("num-cores", 0) if isinstance(target, dict) else 0
    if not isinstance(kind, str) or type(cores) is not int:
        raise ValueError(f"the target {device.target[:100]!r} has no kind, or cores that are no number")
    expect(device.vdevice_id, range(1 << 16), f"the vdevice_id of {kind!r}")


def _check_signature(signature: FunctionSignature, devices: range, constants: range) -> None:
    where = f"function {signature.name!r}"
    expect(signature.num_input, range(len(signature.inputs) + 1), f"num_input of {where}")
    _expect_all(signature.defaults.values(), constants, f"a default of {where}")
    for name in signature.defaults:
        if name not in signature.input_names[signature.num_input :]:
            raise ValueError(f"{where} has a default of {name!r}, which is no input that a call may leave out")
    for name in (*signature.donated, *signature.copied):
        if name not in signature.input_names:
            raise ValueError(f"{where} gives away or copies {name!r}, which is no input of it")
    for spec in (*signature.inputs, *signature.outputs):
        for tensor in tensors_of(spec):
            expect(tensor.device, devices, f"the device of {tensor.name!r} in {where}")
            _check_shape(tensor, where)


def _check_shape(tensor: TensorSpec, where: str) -> None:
    sizes = [size for size in tensor.shape or () if isinstance(size, int)]
    if tensor.ndim < -1 or any(size < 0 for size in sizes):
        raise ValueError(f"{tensor.name!r} of {where} has the shape {tensor.shape}, expected sizes >= 0")


def _check_region(region: RegionSpec, metadata: Metadata) -> None:
    where = f"region {region.name!r}"
    devices = range(-1, len(metadata.devices))
    expect(region.device, devices, f"the device of {where}")
    _expect_all((slot.device for slot in region.slots), devices, f"the device of a slot of {where}")
    _expect_all(region.directs, range(len(metadata.constants)), f"a constant of {where}")
    spaces = {SLOT: len(region.slots), DIRECT: len(region.directs), ARENA: 1}
    for command in region.commands:
        if isinstance(command, Dispatch):
            kernel = metadata.kernels.get(command.kernel)
            if kernel is None:
                raise ValueError(f"{where} calls the kernel {command.kernel!r}, which is not there")
            if len(command.operands) != len(kernel.tensors):
                raise ValueError(
                    f"{where} calls the kernel {command.kernel!r} with {len(command.operands)} operands, expected "
                    f"{len(kernel.tensors)}"
                )
        for reference in _references(command):
            if reference.space not in spaces:
                raise ValueError(f"{where} refers to {reference.space[:50]!r}, expected one of {', '.join(spaces)}")
            expect(reference.index, range(spaces[reference.space]), f"a {reference.space} of {where}")


def _references(command: Any) -> Iterable[Reference]:
    if isinstance(command, Copy):
        return (command.source, command.target)
    if isinstance(command, Fill):
        return (command.target,)
    if isinstance(command, Dispatch):
        extra = (command.count, command.when, command.unless)
        return (*command.operands, *(reference for reference in extra if reference is not None))
    return ()


def _check_schedule(schedule: Schedule, devices: range) -> None:
    where = f"the schedule of {schedule.function!r}"
    expect(schedule.inputs, range(schedule.values + 1), f"the inputs of {where}")
    available = set(range(schedule.inputs))
    for step in schedule.steps:
        _expect_all((*step.devices, step.source), devices, f"a device of {where}")
        if not available.issuperset(step.reads):
            raise ValueError(f"{where} reads values {list(step.reads)} that no step before it makes")
        _expect_all(step.makes, range(schedule.values), f"a value of {where}")
        available.update(step.makes)
        if step.is_transfer and (len(step.reads) != 1 or len(step.makes) != 1):
            raise ValueError(f"{where} has a transfer of {len(step.reads)} values into {len(step.makes)}, expected one")
    pending: list[Any] = [schedule.results]
    while pending:
        result = pending.pop()
        if isinstance(result, tuple):
            pending.extend(result)
        elif type(result) is not int or result not in available:
            raise ValueError(f"{where} returns {result!r}, which no step makes")


def _expect_all(found: Iterable[int], allowed: range, what: str) -> None:
    for each in found:
        expect(each, allowed, what)
