"""What encodings became on each device, and what was cancelled: the record that ``relax-hetero explain`` prints."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

Size = int | str
"""Bytes: a number, or an expression of the symbolic extents it depends on."""


@dataclass(frozen=True, slots=True)
class OperandEntry:
    """One tensor of an encoded op: what it is for, and how it is stored.

    Attributes
    ----------
    role : str
        "lhs", "rhs", "init", "data", "weight", "result", or "x1", "x2", ... for what an expression reads besides.
    variable : str
        The encoded tensor's variable.
    shape, dtype : str
        Logical shape ("128x768", symbolic extents by name) and element type.
    encoding : str
        Text of its `Encoding`.
    layout : str
        Text of its `PackedLayout`; empty before SpecializeEncodings.
    bytes_before : int or str
        Row-major, in bytes.
    bytes_after : int or str
        As it is stored, in bytes; equal to `bytes_before` where no layout is known yet.
    packed : str
        Where its layout comes from: "never" (row-major as it is, or no layout yet), "at compile time", "at run time",
        "as a permutation" (nothing is tiled: MovePermutes moves it, most often to where it meets its inverse),
        "by transfer" (it arrives packed), or "by op" (the op that makes it writes this layout).
    """

    role: str
    variable: str
    shape: str
    dtype: str
    encoding: str
    layout: str
    bytes_before: Size
    bytes_after: Size
    packed: str


@dataclass(frozen=True, slots=True)
class EncodedOpEntry:
    """One encoded op.

    Attributes
    ----------
    function, variable : str
        Where it is; the variable as the model calls it.
    op : str
        "matmul", "conv2d", or the expression of elementwise work that no product takes along.
    device : str
        ``kind:i``.
    kernel : str
        The name of its kernel's variant; empty before SpecializeEncodings.
    operands : tuple of OperandEntry
        Its encoded operands in order, then its result.
    epilogue : str
        The expression that its kernel applies before it stores ("" if there is none).
    """

    function: str
    variable: str
    op: str
    device: str
    kernel: str
    operands: tuple[OperandEntry, ...]
    epilogue: str = ""


@dataclass(frozen=True, slots=True)
class CancelledEntry:
    """An op that was encoded and is a stock op again: which one, on which device, and why."""

    function: str
    variable: str
    op: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class EncodedTransferEntry:
    """A tensor that crosses devices while encoded.

    Attributes
    ----------
    function, variable : str
        The variable that holds it on the destination.
    source, destination : str
        Devices.
    layout : str
        How it is stored on the way.
    bytes : int or str
        What goes over the wire.
    relayout : str
        Where it is laid out anew, and from which layout to which; empty where both sides agree.
    """

    function: str
    variable: str
    source: str
    destination: str
    layout: str
    bytes: Size
    relayout: str = ""


@dataclass(slots=True)
class EncodingReport:
    """The encoded ops of a module, its encoded transfers and what was cancelled, in program order."""

    ops: list[EncodedOpEntry] = field(default_factory=list)
    transfers: list[EncodedTransferEntry] = field(default_factory=list)
    cancelled: list[CancelledEntry] = field(default_factory=list)

    def to_json(self) -> str:
        """As a JSON object."""
        return json.dumps(self.to_data())

    def to_data(self) -> dict[str, Any]:
        """As JSON data."""
        return {name: [asdict(entry) for entry in getattr(self, name)] for name in self.__slots__}

    @staticmethod
    def from_json(text: str) -> EncodingReport:
        """Read what `to_json` wrote."""
        return EncodingReport.from_data(json.loads(text))

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> EncodingReport:
        """Read what `to_data` made."""
        return EncodingReport(
            [
                EncodedOpEntry(**{**entry, "operands": tuple(OperandEntry(**operand) for operand in entry["operands"])})
                for entry in data["ops"]
            ],
            [EncodedTransferEntry(**entry) for entry in data["transfers"]],
            [CancelledEntry(**entry) for entry in data["cancelled"]],
        )


# The lists of all `collect_encodings` blocks that are open here, outermost first.
_OPEN: ContextVar[tuple[list[EncodingReport], ...]] = ContextVar("relax_hetero_encodings", default=())


@contextlib.contextmanager
def collect_encodings() -> Iterator[list[EncodingReport]]:
    """A list to which every `SpecializeEncodings` that runs inside the ``with`` block adds its report."""
    reports: list[EncodingReport] = []
    token = _OPEN.set((*_OPEN.get(), reports))
    try:
        yield reports
    finally:
        _OPEN.reset(token)


def publish(report: EncodingReport) -> None:
    """Give a report to every `collect_encodings` that is open."""
    for reports in _OPEN.get():
        reports.append(report)


def is_collecting() -> bool:
    """Whether anyone wants a report."""
    return bool(_OPEN.get())
