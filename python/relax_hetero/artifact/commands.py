"""Commands of command buffers, as plain data and as JSON.

Commands refer to memory: *indirectly* by a slot of the binding table of each submission, or *directly* to memory that
exists when the buffer is recorded (constants), or to the arena of a region's transient values. Extents, offsets and
scalars are integers, or text over the buffer's parameters (symbolic dimensions) in the grammar of `dims.parse_dim`. The
JSON is compact, because a model has a command for every kernel call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from .signature import Dim

SLOT, DIRECT, ARENA = "slot", "direct", "arena"
READ, WRITE, READ_WRITE = "read", "write", "read-write"
GRAPH = "CUDA graph"
"""The value of `RegionSpec.runs` for regions whose arena and constants belong to the machine."""


@dataclass(frozen=True)
class Reference:
    """Bytes that a command reads or writes."""

    space: str  # ``"slot"`` (of the binding table), ``"direct"`` (of the table of constants) or ``"arena"``
    index: int  # index of the slot or constant; 0 for the arena
    offset: Dim = 0  # first byte, relative to the beginning of the binding, the constant or the arena
    length: Dim = 0  # bytes


@dataclass(frozen=True)
class Dispatch:
    """One run of a kernel."""

    kernel: str  # name in `Metadata.kernels`
    operands: tuple[Reference, ...]  # one for each tensor parameter, in order
    scalars: tuple[Dim | float, ...] = ()  # one for each scalar parameter, in order
    grid: tuple[Dim, ...] = (1,)  # workgroup counts along x, y, z
    # Memory of the workgroup counts of an indirect dispatch (int32, as many as `grid` has), read when it runs.
    count: Reference | None = None
    # Memory of an int32: the command runs if it is not zero (`when`), or if it is zero (`unless`).
    when: Reference | None = None
    unless: Reference | None = None
    variable: str = ""  # name of the result in the model; ``""`` without a model


@dataclass(frozen=True)
class Copy:
    """Copy of `source` to `target`, which have the same length and must not overlap."""

    source: Reference
    target: Reference


@dataclass(frozen=True)
class Fill:
    """Fill of `target` with a repeated `pattern` (1, 2, 4 or 8 bytes, as hexadecimal text)."""

    target: Reference
    pattern: str


@dataclass(frozen=True)
class Barrier:
    """Barrier between earlier and later commands; no device needs it yet, because all run commands in order."""


Command: TypeAlias = Dispatch | Copy | Fill | Barrier


@dataclass(frozen=True)
class SlotSpec:
    """The requirements of all commands of a buffer on the memory that is bound to a slot."""

    name: str  # name in messages: the model's variable, or ``slot 3``
    device: int  # manifest index
    nbytes: Dim  # required size in bytes
    alignment: int  # alignment of the first byte, a power of two
    access: str  # ``"read"``, ``"write"``, ``"read-write"``, or ``""`` for an unused slot, which may stay empty
    dtype: str = ""  # required element type; ``""`` for untyped bytes
    shape: tuple[Dim, ...] | None = None  # required shape, if any


@dataclass(frozen=True)
class TensorParam:
    """A tensor parameter of a kernel: extents over the names among the kernel's scalars."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    alignment: int
    access: str


@dataclass(frozen=True)
class ScalarParam:
    """A scalar parameter of a kernel: an extent of its tensors, or a number."""

    name: str
    dtype: str


@dataclass(frozen=True)
class KernelSpec:
    """A kernel that command buffers can run."""

    name: str  # name in the model
    device: int  # manifest index of the device that it was compiled for
    tensors: tuple[TensorParam, ...]  # tensor parameters, in the order of `Dispatch.operands`
    scalars: tuple[ScalarParam, ...] = ()  # scalar parameters: those of `Dispatch.scalars`, then workgroup indices
    # Number of trailing scalars that are workgroup indices (x, y, z), over which the command buffer loops; 0 for a
    # kernel that does all its work in one call.
    workgroups: int = 0
    ops: tuple[str, ...] = ()  # ops that it computes
    symbol: str = ""  # key for `kernel_addresses.kernel_address`; ``""`` if it cannot be called by address


@dataclass(frozen=True)
class RegionSpec:
    """A region of a model: one command buffer."""

    name: str  # symbol of the region
    function: str  # function of the model that contains it
    device: int  # manifest index
    slots: tuple[SlotSpec, ...]  # slots of the binding table: inputs, then outputs
    parameters: tuple[str, ...]  # names of the symbolic dimensions and scalars in the parameter buffer
    directs: tuple[int, ...]  # indices into `Metadata.constants`
    arena: Dim  # bytes of its transient values
    commands: tuple[Command, ...]  # commands in order
    # ``"host function"``, ``"CUDA graph"``, or the word of `Backend.submission` ("stream"); ``"walked commands"``
    # without the compiler.
    runs: str = "host function"
    ended_by: str = ""  # the next binding, which could not become a command and ended the region

    @property
    def kernels(self) -> tuple[str, ...]:
        """The distinct kernels of its dispatches, in order of first use."""
        return tuple(dict.fromkeys(c.kernel for c in self.commands if isinstance(c, Dispatch)))


@dataclass(frozen=True)
class SingleCall:
    """A kernel call of the model outside of regions."""

    # Function of the call, and name of the result in the model.
    function: str
    variable: str
    kernel: str
    why: str


_GRID = (1,)


def region_to_json(region: RegionSpec) -> dict[str, Any]:
    """A region as a JSON object."""
    return {
        **vars(region),
        "slots": [dict(vars(slot)) for slot in region.slots],
        "commands": [_command_to_json(command) for command in region.commands],
    }


def region_from_json(data: dict[str, Any]) -> RegionSpec:
    """The inverse of `region_to_json`; KeyError, TypeError or ValueError for anything else."""
    slots = (SlotSpec(**{**slot, "shape": _tuple(slot["shape"])}) for slot in data["slots"])
    commands = tuple(map(_command_from_json, data["commands"]))
    parameters, directs = tuple(data["parameters"]), tuple(data["directs"])
    parsed = {"slots": tuple(slots), "commands": commands, "parameters": parameters, "directs": directs}
    return RegionSpec(**{**data, **parsed})


def kernel_to_json(kernel: KernelSpec) -> dict[str, Any]:
    """A kernel as a JSON object."""
    tensors, scalars = ([dict(vars(param)) for param in params] for params in (kernel.tensors, kernel.scalars))
    return {**vars(kernel), "tensors": tensors, "scalars": scalars}


def kernel_from_json(data: dict[str, Any]) -> KernelSpec:
    """The inverse of `kernel_to_json`; KeyError or TypeError for anything else."""
    tensors = tuple(TensorParam(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in data["tensors"])
    scalars = tuple(ScalarParam(**scalar) for scalar in data["scalars"])
    return KernelSpec(**{**data, "tensors": tensors, "scalars": scalars, "ops": tuple(data["ops"])})


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _reference_to_json(reference: Reference) -> list[Any]:
    return [reference.space, reference.index, reference.offset, reference.length]


def _command_to_json(command: Command) -> dict[str, Any]:
    if isinstance(command, Copy):
        return {"copy": _reference_to_json(command.source), "to": _reference_to_json(command.target)}
    if isinstance(command, Fill):
        return {"fill": _reference_to_json(command.target), "pattern": command.pattern}
    if isinstance(command, Barrier):
        return {"barrier": True}
    data: dict[str, Any] = {"dispatch": command.kernel, "operands": list(map(_reference_to_json, command.operands))}
    if command.scalars:
        data["scalars"] = list(command.scalars)
    if command.grid != _GRID:
        data["grid"] = list(command.grid)
    for name in ("count", "when", "unless"):
        reference = getattr(command, name)
        if reference is not None:
            data[name] = _reference_to_json(reference)
    if command.variable:
        data["variable"] = command.variable
    return data


def _command_from_json(data: dict[str, Any]) -> Command:
    if "copy" in data:
        return Copy(Reference(*data["copy"]), Reference(*data["to"]))
    if "fill" in data:
        return Fill(Reference(*data["fill"]), data["pattern"])
    if "barrier" in data:
        return Barrier()
    references = {name: Reference(*data[name]) for name in ("count", "when", "unless") if name in data}
    return Dispatch(
        kernel=data["dispatch"],
        operands=tuple(Reference(*operand) for operand in data["operands"]),
        scalars=tuple(data.get("scalars", ())),
        grid=tuple(data.get("grid", _GRID)),
        variable=data.get("variable", ""),
        **references,
    )
