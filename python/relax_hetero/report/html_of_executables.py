"""Executables as HTML: what they compute, on which devices, and how to see more."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..artifact.metadata import device_names
from .html_elements import Column, bytes_text, device, paragraph, table, view

if TYPE_CHECKING:
    from ..vm.file.executable import Executable

_MOST = 12


def executable_html(executable: Executable) -> str:
    """Tables of the functions and the devices; an executable of any compiler has them."""
    about = executable.metadata
    names = device_names(about.devices)
    plan = executable.memory_plan
    functions = [(str(about.signatures[name]),) for name in executable.function_names]
    placed = [entry for entry in about.placement or () if entry["kind"] in ("op", "transfer")]
    ops = Counter(entry["device"] for entry in placed if entry["kind"] == "op")
    moved = Counter(entry["device"] for entry in placed if entry["kind"] == "transfer")
    kernels = Counter(names[i] for dispatch in about.dispatches.values() for i in dispatch.devices if i >= 0)
    rows = [
        (device(name, names), spec.kind, ops[name], kernels[name], moved[name], bytes_text(plan.weights(index)))
        for index, (name, spec) in enumerate(zip(names, about.devices, strict=True))
    ]
    columns = [
        *(Column("device"), Column("kind"), Column("ops", True), Column("kernels", True)),
        *(Column("transfers in", True), Column("weights", True)),
    ]
    more = len(functions) - _MOST
    return view(
        table("Functions", [Column("signature")], functions[:_MOST]),
        *([paragraph(f"and {more} more functions")] if more > 0 else []),
        table("Devices", columns, rows),
        paragraph("explain() prints why each op is where it is; memory_plan is the memory of a call."),
    )
