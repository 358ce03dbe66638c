"""A report of fusions, printed: what each kernel computes, and what stayed out of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .console import console, plural, print_table


def print_fusions(fusions: Mapping[str, Any], every_op: bool) -> None:
    """Print kernels by how often they run, what was not fused and, if asked for, every call of a kernel."""
    dispatches, declined = fusions["dispatches"], fusions["declined"]
    if every_op and dispatches:
        rows = [
            [entry["variable"], entry["kernel"], entry["device"] or "host", ", ".join(entry["ops"])]
            for entry in dispatches
        ]
        print_table("Dispatches", ["variable", "kernel", "device", "computes"], rows)
    if declined:
        rows = [[entry["variable"], entry["op"], entry["reason"]] for entry in declined]
        print_table("Not fused", ["variable", "op", "why"], rows)
    ops = sum(len(entry["ops"]) for entry in dispatches)
    kernels = len({entry["kernel"] for entry in dispatches})
    console().print(
        f"{plural(ops, 'op')} in {plural(len(dispatches), 'kernel call')} of {plural(kernels, 'kernel')}, "
        f"{len(declined):,} not fused.",
        markup=False,
    )
