"""Reports of passes as plain data: devices of values with reasons, layouts, kernels and their ops.

``relax-hetero explain`` prints them, and an executable's metadata holds them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...artifact.typed_data import fields_data, fields_from_data, from_data, to_data

if TYPE_CHECKING:
    from typing_extensions import Self


class Report:
    """A report of passes, as JSON and from it."""

    __slots__ = ()

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_data())

    def to_data(self) -> Any:
        """The report as JSON data: lists of its entries by name."""
        return fields_data(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Parameters
        ----------
        text : str
            JSON text.
        """
        return cls.from_data(json.loads(text))

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Read what `to_data` made.

        Parameters
        ----------
        data : mapping of str to list
            Report as JSON data.
        """
        report: Self = fields_from_data(cls, data)
        return report


@dataclass(frozen=True, slots=True)
class PlacementEntry:
    """One op, transfer, parameter or constant of a placed module.

    Attributes
    ----------
    function : str
        Function of the module.
    variable : str
        The variable that is bound; for a constant the one whose binding uses it first.
    op : str
        E.g. "relax.add", "relax.to_vdevice", "parameter", "constant".
    device : str
        ``kind:i``.
    device_index : int
        Position in the module's vdevice list.
    reason : str
        A sentence.
    bytes : int, optional
        Size of the result; None where it depends on a symbolic or unknown shape.
    kind : str
        "op", "transfer", "param" or "constant".
    """

    function: str
    variable: str
    op: str
    device: str
    device_index: int
    reason: str
    bytes: int | None
    kind: str


@dataclass(slots=True)
class PlacementReport(Report):
    """The entries of one `RealizeVDevice` run, in program order.

    Attributes
    ----------
    entries : list of PlacementEntry
        Ops, transfers, parameters and constants in program order.
    """

    entries: list[PlacementEntry] = field(default_factory=list)

    def to_data(self) -> list[dict[str, Any]]:
        """The report as JSON data: a list of its entries."""
        data: list[dict[str, Any]] = to_data(self.entries)
        return data

    @classmethod
    def from_data(cls, data: Any) -> PlacementReport:
        """Read what `to_data` made.

        Parameters
        ----------
        data : iterable of mapping of str to object
            List of entries as JSON data.
        """
        return cls(from_data(list[PlacementEntry], data))


@dataclass(frozen=True, slots=True)
class DispatchEntry:
    """One call of a kernel."""

    # Function of the call, and variable of its result.
    function: str
    variable: str
    kernel: str  # the PrimFunc's name
    device: str  # ``kind:i``; empty for kernels that compute shapes on the host
    ops: tuple[str, ...]  # ops that it computes, in order: more than one where ops were fused
    precision: str  # the element types of its products, else those of its arguments (`kernels.precision_of`)
    # Nodes of the model's graph that it computes, by position in the graph's function (`kernel_nodes`).
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MissedFusion:
    """Work that stayed out of a kernel."""

    # Function of the op, and variable of its result.
    function: str
    variable: str
    op: str  # the op that stayed out, or whose kernel did not fuse another op
    reason: str  # form of the program, and the form that the fusion needs


@dataclass(slots=True)
class FusionReport(Report):
    """The kernel calls of a module, and its missed fusions, in program order.

    Attributes
    ----------
    dispatches : list of DispatchEntry
        Kernel calls and the ops that each computes.
    missed : list of MissedFusion
        Ops that were not fused, with the reason.
    """

    dispatches: list[DispatchEntry] = field(default_factory=list)
    missed: list[MissedFusion] = field(default_factory=list)


Size = int | str  # bytes: a number, or an expression of the symbolic extents it depends on


@dataclass(frozen=True, slots=True)
class OperandEntry:
    """One tensor of an encoded op: its role and its layout."""

    # "lhs", "rhs", "init", "data", "weight", "result", or "x1", "x2", ... for further operands of an expression.
    role: str
    variable: str  # the encoded tensor's variable
    # Logical shape ("128x768", symbolic extents by name) and element type.
    shape: str
    dtype: str
    encoding: str  # text of its `Encoding`
    layout: str  # text of its `PackedLayout`; empty before SpecializeEncodings
    bytes_before: Size  # size in row-major order, in bytes
    bytes_after: Size  # size in its layout, in bytes; equal to `bytes_before` if no layout is known yet
    # Origin of its layout: "never" (row-major, or no layout yet), "at compile time", "at run time", "as a permutation"
    # (nothing is tiled: MovePermutes moves it, most often to its inverse), "by transfer" (it arrives packed), or "by
    # op" (the op that makes it writes this layout).
    packed: str


@dataclass(frozen=True, slots=True)
class EncodedOpEntry:
    """One encoded op."""

    # Function of the op, and variable of its result in the model.
    function: str
    variable: str
    op: str  # "matmul", "conv2d", or the expression of elementwise work that no product fuses
    device: str  # ``kind:i``
    kernel: str  # the name of its kernel's variant; empty before SpecializeEncodings
    operands: tuple[OperandEntry, ...]  # its encoded operands in order, then its result
    epilogue: str = ""  # the expression that its kernel applies before it stores ("" if there is none)
    # Algorithm of a convolution, and why: ``direct: windows are not of 3x3 elements``; "" if there is one only.
    form: str = ""


@dataclass(frozen=True, slots=True)
class CancelledEntry:
    """An op that was encoded and is a stock op again, with the reason."""

    function: str
    variable: str
    op: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class EncodedTransferEntry:
    """A tensor that crosses devices while encoded."""

    # Function of the transfer, and variable of the tensor on the destination.
    function: str
    variable: str
    # Devices.
    source: str
    destination: str
    layout: str  # layout during the transfer
    bytes: Size  # bytes that the transfer moves
    relayout: str = ""  # device that changes the layout, with both layouts; empty if source and destination agree


@dataclass(slots=True)
class EncodingReport(Report):
    """The encoded ops of a module, its encoded transfers and its cancelled encodings, in program order.

    Attributes
    ----------
    ops : list of EncodedOpEntry
        Ops with encoded operands, and the layouts of these.
    transfers : list of EncodedTransferEntry
        Transfers of encoded tensors.
    cancelled : list of CancelledEntry
        Ops whose encoding was cancelled, with the reason.
    """

    ops: list[EncodedOpEntry] = field(default_factory=list)
    transfers: list[EncodedTransferEntry] = field(default_factory=list)
    cancelled: list[CancelledEntry] = field(default_factory=list)
