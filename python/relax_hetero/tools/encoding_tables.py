"""A report of encodings, added up per device and printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .console import bytes_text, console, plural, print_table


@dataclass(frozen=True)
class EncodingTotal:
    """What encodings do on one device.

    Attributes
    ----------
    device : str
    ops, kernels : int
        Encoded ops, and the distinct kernels that compute them.
    packed : int
        Tensors that are packed on it, each once: weights at compile time, others at run time.
    bytes_before, bytes_after : int
        Of these, row-major and as they are stored.
    unknown_sizes : int
        Packed tensors that are not in the sums: their size depends on a symbolic shape.
    cancelled : int
        Ops that stay stock ops.
    """

    device: str
    ops: int
    kernels: int
    packed: int
    bytes_before: int
    bytes_after: int
    unknown_sizes: int
    cancelled: int


def encoding_totals(encodings: Mapping[str, Any]) -> list[EncodingTotal]:
    """One total per device that has an encoded or a cancelled op, by name."""
    devices = sorted({entry["device"] for entry in (*encodings["ops"], *encodings["cancelled"])})
    return [_total(device, encodings) for device in devices]


def _total(device: str, encodings: Mapping[str, Any]) -> EncodingTotal:
    ops = [op for op in encodings["ops"] if op["device"] == device]
    # A tensor that several ops read is packed once.
    packed = {
        (op["function"], operand["variable"]): (operand["bytes_before"], operand["bytes_after"])
        for op in ops
        for operand in op["operands"]
        if operand["packed"] in ("at compile time", "at run time")
    }
    known = [sizes for sizes in packed.values() if all(isinstance(size, int) for size in sizes)]
    return EncodingTotal(
        device=device,
        ops=len(ops),
        kernels=len({op["kernel"] for op in ops if op["kernel"]}),
        packed=len(packed),
        bytes_before=sum(before for before, _ in known),
        bytes_after=sum(after for _, after in known),
        unknown_sizes=len(packed) - len(known),
        cancelled=sum(entry["device"] == device for entry in encodings["cancelled"]),
    )


def print_encodings(encodings: Mapping[str, Any], every_op: bool) -> None:
    """Print the totals, what was cancelled, encoded transfers and, if asked for, every op's layouts."""
    totals = encoding_totals(encodings)
    columns = ["device", "encoded ops", "kernels", "packed tensors", "bytes before", "bytes after", "cancelled"]
    rows = [
        [
            total.device,
            f"{total.ops:,}",
            f"{total.kernels:,}",
            f"{total.packed:,}" + (f" ({total.unknown_sizes:,} of symbolic size)" if total.unknown_sizes else ""),
            bytes_text(total.bytes_before),
            bytes_text(total.bytes_after),
            f"{total.cancelled:,}",
        ]
        for total in totals
    ]
    if rows:
        print_table("Encodings", columns, rows, right=columns[1:])
    if encodings["transfers"]:
        columns = ["encoded transfer", "from", "to", "layout on the way", "bytes", "laid out anew"]
        fields = ("variable", "source", "destination", "layout")
        rows = [
            [*(entry[field] for field in fields), size_text(entry["bytes"]), entry["relayout"] or "no"]
            for entry in encodings["transfers"]
        ]
        print_table("Encoded transfers", columns, rows, right=["bytes"])
    if encodings["cancelled"]:
        rows = [[entry[field] for field in ("variable", "op", "device", "reason")] for entry in encodings["cancelled"]]
        print_table("Cancelled encodings", ["variable", "op", "device", "why"], rows)
    if every_op and encodings["ops"]:
        columns = ["variable", "op", "device", "operand", "shape", "layout", "packed", "bytes"]
        print_table("Layouts", columns, [row for op in encodings["ops"] for row in _operand_rows(op)])
    ops = len(encodings["ops"])
    console().print(
        f"{plural(ops, 'encoded op')}, {plural(len(encodings['transfers']), 'encoded transfer')}, "
        f"{len(encodings['cancelled']):,} cancelled.",
        markup=False,
    )


def size_text(size: int | str) -> str:
    """Bytes as people read them; an expression of symbolic extents as it is."""
    return bytes_text(size) if isinstance(size, int) else size


def _operand_rows(op: Mapping[str, Any]) -> Iterator[list[str]]:
    what = op["op"] + (f", then {op['epilogue']}" if op["epilogue"] else "")
    head = [op["variable"], what, op["device"]]
    for operand in op["operands"]:
        before, after = size_text(operand["bytes_before"]), size_text(operand["bytes_after"])
        yield [
            *head,
            operand["role"],
            f"{operand['dtype']} {operand['shape']}",
            operand["layout"] or "none yet",
            operand["packed"],
            before if before == after else f"{before}, stored in {after}",
        ]
        head = ["", "", ""]
