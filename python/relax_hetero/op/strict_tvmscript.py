"""Strict look-up of vdevices in TVMScript.

Stock TVMScript (0.27) splits ``"kind:i"`` itself. An unknown kind becomes a log line and a tensor without a device, a
malformed number a Python error about ``int()``, and a VDevice object that is not the module's own is kept, although
passes compare vdevices by identity. `make_tvmscript_strict` replaces the functions that read names:

- ``TensorProxy.as_ty``, which ``R.Tensor(..., vdevice)`` calls;
- ``R.to_vdevice`` and ``R.hint_on_device``, which become the operators of this package under stock parameter names;
- ``I.lookup_vdevice``, which all other look-ups of vdevices call;
- ``I.vdevice``, which becomes `VDevice`: an unknown kind is refused, with the nearest known name.

Nothing else changes: names that stock TVMScript resolves are resolved to the same vdevice. Errors are raised as
`VDeviceError`; TVM's parser turns them into its own ``DiagnosticError`` with the same message, the file and the line.

If such an error ends the program, TVM's hook prints how to get a backtrace instead of the error. `show_errors` prints
the error first.
"""

from __future__ import annotations

import copy
import sys
from types import ModuleType, TracebackType
from typing import Any

import tvm
from tvm import relax
from tvm.error import DiagnosticError
from tvm.relax import script as relax_script
from tvm.relax.script import builder as relax_builder_package
from tvm.relax.script import parser as relax_parser
from tvm.relax.script.builder import ir as relax_builder
from tvm.relax.script.parser import entry as relax_entry
from tvm.relax.script.parser.entry import TensorProxy
from tvm.script.ir_builder import ir as ir_builder_package
from tvm.script.ir_builder.ir import ir as ir_builder
from tvm.script.parser import ir as ir_parser

from ..errors import VDeviceError
from ..target.vdevice import VDevice, VDeviceSpec
from . import placement
from .placement import Operand, resolve, vdevices_under_construction

# Modules that hold a stock function under its own name, because of `from ... import *`.
_RELAX_NAMESPACES: tuple[ModuleType, ...] = (relax_builder, relax_builder_package, relax_parser, relax_script)
_IR_NAMESPACES: tuple[ModuleType, ...] = (ir_builder, ir_builder_package, ir_parser, relax_builder, relax_entry)

_stock_as_ty = TensorProxy.as_ty


def make_tvmscript_strict() -> None:
    """Replace TVMScript's look-up of vdevices by the strict one (idempotent)."""
    TensorProxy.as_ty = _as_ty
    for namespace in _RELAX_NAMESPACES:
        namespace.to_vdevice = to_vdevice  # type: ignore[attr-defined]
        namespace.hint_on_device = hint_on_device  # type: ignore[attr-defined]
    for namespace in (ir_builder, ir_builder_package, ir_parser):
        namespace.vdevice = vdevice  # type: ignore[attr-defined]
    for namespace in _IR_NAMESPACES:
        namespace.lookup_vdevice = lookup_vdevice  # type: ignore[attr-defined]
    show_errors()


def show_errors() -> None:
    """Print errors in TVMScript that end the program (idempotent)."""
    if not isinstance(sys.excepthook, _ShowErrors):
        sys.excepthook = _ShowErrors(sys.excepthook)


class _ShowErrors:
    """Hook for exceptions that end the program, which calls the previous hook at its end.

    `hook`: previous hook: TVM's, which prints a ``DiagnosticError`` only with ``TVM_BACKTRACE=1``, or one that calls
    it.
    """

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind is DiagnosticError and not tvm._should_print_backtrace() and sys.stderr is not None:
            print(error, file=sys.stderr, flush=True)
        self._hook(kind, error, trace)


def vdevice(target: Any = None, vdevice_id: int = 0, memory_scope: str = "global") -> tvm.relax.VDevice:
    """Stock TVMScript's name of `VDevice`."""
    return VDevice(target, vdevice_id, memory_scope)


def to_vdevice(data: Operand, dst_vdevice: VDeviceSpec) -> relax.Expr:
    """`relax_hetero.op.to_vdevice` with the parameter names of stock TVMScript, which its printer writes."""
    return placement.to_vdevice(data, dst_vdevice)


def hint_on_device(data: Operand, dst_vdevice: VDeviceSpec, memory_scope: str | None = None) -> relax.Expr:
    """`relax_hetero.op.hint_on_device` with the parameter names of stock TVMScript."""
    return placement.hint_on_device(data, dst_vdevice, memory_scope)


def lookup_vdevice(target_kind: str | None = None, device_index: int = -1) -> tvm.relax.VDevice:
    """The `device_index`-th vdevice of a kind ("vdevice": of all) in the module under construction.

    Raises VDeviceError if the module lacks the vdevice, or no module is under construction.
    """
    if not isinstance(target_kind, str):
        raise VDeviceError(f"lookup_vdevice needs a target kind or 'vdevice', got {target_kind!r}")
    return resolve(f"{target_kind}:{device_index}")


def _as_ty(proxy: TensorProxy, dict_globals: dict[str, Any] | None = None) -> tvm.relax.TensorType:
    """Resolve the proxy's vdevice, then call the stock method."""
    vdevice: Any = proxy.vdevice
    unchecked = isinstance(vdevice, tvm.relax.VDevice) and vdevices_under_construction() is None
    if vdevice is not None and not unchecked:
        proxy = copy.copy(proxy)
        proxy.vdevice = resolve(vdevice)
    return _stock_as_ty(proxy, dict_globals)
