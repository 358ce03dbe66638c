"""Commands of command buffers, as plain data and as JSON.

Commands refer to memory: *indirectly* by a slot of the binding table of each submission, or *directly* to memory that
exists when the buffer is recorded (constants), or to the arena of a region's transient values. Extents, offsets and
scalars are integers, or text over the buffer's parameters (symbolic dimensions) in the grammar of `dims.parse_dim`. The
JSON is compact, because a model has a command for every kernel call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from .signature import Dim
from .typed_data import fields_from_data, to_data

SLOT, DIRECT, ARENA = "slot", "direct", "arena"
READ, WRITE, READ_WRITE = "read", "write", "read-write"
GRAPH = "CUDA graph"  # the value of `RegionSpec.runs` for regions whose arena and constants belong to the machine


@dataclass(frozen=True)
class Reference:
    """Bytes that a command reads or writes."""

    IS_ROW = True
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

    def to_data(self) -> dict[str, Any]:
        """JSON data without fields that have their defaults."""
        changed = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        data = {name: to_data(getattr(self, name)) for name in changed}
        return {"dispatch": data.pop("kernel"), **data}

    @staticmethod
    def from_data(data: dict[str, Any]) -> Command:
        """The command that `to_data` of a class of commands made JSON data of."""
        if "copy" in data:
            return Copy(Reference(*data["copy"]), Reference(*data["to"]))
        if "fill" in data:
            return Fill(Reference(*data["fill"]), data["pattern"])
        if "barrier" in data:
            return Barrier()
        named = {name: value for name, value in data.items() if name != "dispatch"}
        dispatch: Dispatch = fields_from_data(Dispatch, {"kernel": data["dispatch"], **named})
        return dispatch


@dataclass(frozen=True)
class Copy:
    """Copy of `source` to `target`, which have the same length and must not overlap."""

    source: Reference
    target: Reference

    def to_data(self) -> dict[str, Any]:
        """JSON data."""
        return {"copy": to_data(self.source), "to": to_data(self.target)}


@dataclass(frozen=True)
class Fill:
    """Fill of `target` with a repeated `pattern` (1, 2, 4 or 8 bytes, as hexadecimal text)."""

    target: Reference
    pattern: str

    def to_data(self) -> dict[str, Any]:
        """JSON data."""
        return {"fill": to_data(self.target), "pattern": self.pattern}


@dataclass(frozen=True)
class Barrier:
    """Barrier between earlier and later commands; no device needs it yet, because all run commands in order."""

    def to_data(self) -> dict[str, Any]:
        """JSON data."""
        return {"barrier": True}


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
