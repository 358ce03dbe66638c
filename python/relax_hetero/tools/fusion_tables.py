"""A report of fusions, printed: what each kernel computes, and what stayed out of kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .console import console, plural, print_table


def print_fusions(fusions: Mapping[str, Any], every_op: bool) -> None:
    """Print kernels by how often they run, what was not fused and, if asked for, every call of a kernel."""
    dispatches, declined = fusions["dispatches"], fusions["declined"]
    if every_op and dispatches:
        rows = [
            [
                entry["variable"],
                entry["kernel"],
                entry["device"] or "host",
                # A library that was made before reports had it lacks the precision.
                entry.get("precision", ""),
                ", ".join(entry["ops"]),
            ]
            for entry in dispatches
        ]
        print_table("Dispatches", ["variable", "kernel", "device", "precision", "computes"], rows)
    if declined:
        rows = [[entry["variable"], entry["op"], entry["reason"]] for entry in declined]
        print_table("Not fused", ["variable", "op", "why"], rows)
    ops = sum(len(entry["ops"]) for entry in dispatches)
    kernels = len({entry["kernel"] for entry in dispatches})
    console().print(
        f"{plural(ops, 'op')} in {plural(len(dispatches), 'kernel call')} of {plural(kernels, 'kernel')}, "
        f"{len(declined):,} not fused. {precisions_text(product_precisions(fusions))}",
        markup=False,
    )


def product_precisions(fusions: Mapping[str, Any]) -> dict[str, int]:
    """How many kernel calls compute products in which precision, the most frequent first."""
    products = [entry for entry in fusions["dispatches"] if any(map(_is_product, entry["ops"]))]
    return dict(Counter(entry.get("precision", "") for entry in products).most_common())


def precisions_text(precisions: Mapping[str, int]) -> str:
    """``Products: 53 in u8*s8->s32, 1 in f32.``"""
    counts = ", ".join(f"{count:,} in {precision or 'what is not known'}" for precision, count in precisions.items())
    return f"Products: {counts or 'none'}."


def _is_product(op: str) -> bool:
    return "matmul" in op or op.startswith("conv") or op == "attention"
