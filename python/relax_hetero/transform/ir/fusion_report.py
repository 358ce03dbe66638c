"""Which kernel computes what, and what was not fused and why: the record that ``relax-hetero explain`` prints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

import tvm

from ...target.vdevice import device_name, vdevices_of
from .calls import call_vdevice, called_prim_func
from .kernel_ops import ops_of
from .kernel_work import precision_of
from .rewriting import relax_functions, walk_bindings


@dataclass(frozen=True, slots=True)
class DispatchEntry:
    """One call of a kernel.

    Attributes
    ----------
    function, variable : str
        Where it is; the variable holds its result.
    kernel : str
        The PrimFunc's name.
    device : str
        ``kind:i``; empty for what computes shapes on the host.
    ops : tuple of str
        What it computes, in order: more than one op where ops were fused.
    precision : str
        The element types of its products, else those of its arguments (`kernel_work.precision_of`).
    """

    function: str
    variable: str
    kernel: str
    device: str
    ops: tuple[str, ...]
    precision: str


@dataclass(frozen=True, slots=True)
class Declined:
    """Work that stayed out of a kernel.

    Attributes
    ----------
    function, variable : str
        Where it is in the model.
    op : str
        The op that stayed out, or whose kernel did not take another in.
    reason : str
        What was found and what would have been needed.
    """

    function: str
    variable: str
    op: str
    reason: str


@dataclass(slots=True)
class FusionReport:
    """The kernel calls of a module, and what was not fused, in program order."""

    dispatches: list[DispatchEntry] = field(default_factory=list)
    declined: list[Declined] = field(default_factory=list)

    def to_data(self) -> dict[str, Any]:
        """As JSON data, which has no tuples."""

        def plain(entry: DispatchEntry | Declined) -> dict[str, Any]:
            return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(entry).items()}

        return {name: [plain(entry) for entry in getattr(self, name)] for name in self.__slots__}


_OPEN: ContextVar[tuple[FusionReport, ...]] = ContextVar("relax_hetero_fusions", default=())


@contextlib.contextmanager
def collect_fusions() -> Iterator[FusionReport]:
    """A report that the passes which run inside the ``with`` block fill."""
    report = FusionReport()
    token = _OPEN.set((*_OPEN.get(), report))
    try:
        yield report
    finally:
        _OPEN.reset(token)


def is_collecting() -> bool:
    """Whether anyone wants a report."""
    return bool(_OPEN.get())


def decline(function: str, variable: str, op: str, reason: str) -> None:
    """Say why something was not fused; each reason is kept once, and costs nothing where nobody listens."""
    entry = Declined(function, variable, op, reason)
    for report in _OPEN.get():
        if entry not in report.declined:
            report.declined.append(entry)


def record_dispatches(mod: tvm.IRModule) -> None:
    """Note the kernel calls of a module whose dispatches are formed, for those who listen."""
    reports = _OPEN.get()
    if not reports:
        return
    vdevices = vdevices_of(mod)
    entries = []
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func):
            kernel = called_prim_func(mod, binding.value)
            if kernel is None:
                continue
            vdevice = call_vdevice(binding.value)
            device = device_name(vdevice, vdevices) if vdevice is not None else ""
            code = mod.functions[kernel]
            names = (gv.name_hint, binding.var.name, kernel.name_hint, device)
            entries.append(DispatchEntry(*names, ops_of(code), precision_of(code)))
    for report in reports:
        report.dispatches = entries
