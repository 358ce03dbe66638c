"""Tables about encodings (how tensors are stored) and fusions (which ops each kernel computes)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...display.console import Shown, table
from ...display.text import bytes_text, plural


@dataclass(frozen=True)
class EncodingTotal:
    """Sums over the encodings on one device."""

    device: str
    # Number of encoded ops, and of distinct kernels that compute them.
    ops: int
    kernels: int
    packed: int  # number of packed tensors: weights are packed at compile time, others at run time
    # Their bytes in row-major order, and as stored.
    bytes_before: int
    bytes_after: int
    unknown_sizes: int  # number of packed tensors of symbolic size, which are not in the bytes
    cancelled: int  # number of ops whose encoding was cancelled


def encoding_totals(encodings: Mapping[str, Any]) -> list[EncodingTotal]:
    """Totals of each device with an encoded or cancelled op, sorted by name."""
    devices = sorted({entry["device"] for entry in (*encodings["ops"], *encodings["cancelled"])})
    return [_total(device, encodings) for device in devices]


def _total(device: str, encodings: Mapping[str, Any]) -> EncodingTotal:
    ops = [op for op in encodings["ops"] if op["device"] == device]
    # The key is unique per tensor: one that several ops read is packed once.
    packed = {
        (op["function"], operand["variable"]): (operand["bytes_before"], operand["bytes_after"])
        for op in ops
        for operand in op["operands"]
        if operand["packed"] in ("at compile time", "at run time")
    }
    static = [sizes for sizes in packed.values() if all(isinstance(size, int) for size in sizes)]
    return EncodingTotal(
        device=device,
        ops=len(ops),
        kernels=len({op["kernel"] for op in ops if op["kernel"]}),
        packed=len(packed),
        bytes_before=sum(before for before, _ in static),
        bytes_after=sum(after for _, after in static),
        unknown_sizes=len(packed) - len(static),
        cancelled=sum(entry["device"] == device for entry in encodings["cancelled"]),
    )


def encoding_tables(encodings: Mapping[str, Any]) -> Iterator[Shown]:
    """Tables of totals by device, encoded transfers, cancelled encodings, layouts, and forms of convolutions."""
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
        yield table("Encodings", columns, rows, right=columns[1:])
    if encodings["transfers"]:
        columns = ["encoded transfer", "from", "to", "layout on the way", "bytes", "relayout"]
        fields = ("variable", "source", "destination", "layout")
        rows = [
            [*(entry[field] for field in fields), size_text(entry["bytes"]), entry["relayout"] or "no"]
            for entry in encodings["transfers"]
        ]
        yield table("Encoded transfers", columns, rows, right=["bytes"])
    if encodings["cancelled"]:
        rows = [[entry[field] for field in ("variable", "op", "device", "reason")] for entry in encodings["cancelled"]]
        yield table("Cancelled encodings", ["variable", "op", "device", "why"], rows)
    if encodings["ops"]:
        columns = ["variable", "op", "device", "operand", "shape", "layout", "packed", "bytes"]
        yield table("Layouts", columns, [row for op in encodings["ops"] for row in _operand_rows(op)])
    # Older libraries lack the form.
    forms = [(op, op.get("form", "").partition(": ")) for op in encodings["ops"] if op.get("form")]
    if forms:
        rows = [[op["variable"], op["device"], form, reason] for op, (form, _, reason) in forms]
        yield table("Forms of convolutions", ["variable", "device", "form", "why"], rows)
    yield encodings_line(encodings)


def encodings_line(encodings: Mapping[str, Any]) -> str:
    """Numbers of encoded ops, encoded transfers and cancelled encodings."""
    return (
        f"{plural(len(encodings['ops']), 'encoded op')}, "
        f"{plural(len(encodings['transfers']), 'encoded transfer')}, {len(encodings['cancelled']):,} cancelled."
    )


def size_text(size: int | str) -> str:
    """Format a number of bytes; symbolic expressions stay as they are."""
    return bytes_text(size) if isinstance(size, int) else size


def _operand_rows(op: Mapping[str, Any]) -> Iterator[list[str]]:
    head = [op["variable"], op["op"] + (f", then {op['epilogue']}" if op["epilogue"] else ""), op["device"]]
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


def fusion_tables(fusions: Mapping[str, Any]) -> Iterator[Shown]:
    """Tables of kernel calls with their ops, and of missed fusions."""
    dispatches, missed = fusions["dispatches"], fusions["missed"]
    if dispatches:
        rows = [
            [
                entry["variable"],
                entry["kernel"],
                entry["device"] or "host",
                # Older libraries lack the precision.
                entry.get("precision", ""),
                ", ".join(entry["ops"]),
            ]
            for entry in dispatches
        ]
        yield table("Dispatches", ["variable", "kernel", "device", "precision", "computes"], rows)
    if missed:
        rows = [[entry["variable"], entry["op"], entry["reason"]] for entry in missed]
        yield table("Not fused", ["variable", "op", "why"], rows)
    yield fusions_line(fusions)


def fusions_line(fusions: Mapping[str, Any]) -> str:
    """Numbers of ops, kernel calls and missed fusions, and precisions of products."""
    dispatches = fusions["dispatches"]
    ops = sum(len(entry["ops"]) for entry in dispatches)
    kernels = len({entry["kernel"] for entry in dispatches})
    return (
        f"{plural(ops, 'op')} in {plural(len(dispatches), 'kernel call')} of {plural(kernels, 'kernel')}, "
        f"{len(fusions['missed']):,} not fused. {precisions_text(product_precisions(fusions))}"
    )


def product_precisions(fusions: Mapping[str, Any]) -> dict[str, int]:
    """Number of kernel calls that compute products, by precision, most frequent first."""
    products = [entry for entry in fusions["dispatches"] if any(map(_is_product, entry["ops"]))]
    return dict(Counter(entry.get("precision", "") for entry in products).most_common())


def precisions_text(precisions: Mapping[str, int]) -> str:
    """Format precisions, such as ``Products: 53 in u8*s8->s32, 1 in f32.``."""
    counts = ", ".join(f"{count:,} in {precision or 'unknown precision'}" for precision, count in precisions.items())
    return f"Products: {counts or 'none'}."


def _is_product(op: str) -> bool:
    return "matmul" in op or op.startswith("conv") or op == "attention"
