"""The module that is being built right now: by TVMScript, else by a ``BlockBuilder``."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.script.builder import ir as relax_builder
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder.ir import IRModuleFrame

from ..errors import PlacementError, VDeviceError
from ..target.vdevice import VDeviceSpec, lookup, vdevices_of


def vdevices_under_construction() -> list[tvm.relax.VDevice] | None:
    """Vdevices of the module under construction, None where no module is.

    TVMScript wins over a ``BlockBuilder``: parsing a module inside a builder's scope is about the parsed module.
    """
    if IRBuilder.is_in_scope():
        frames = [frame for frame in IRBuilder.current().frames if isinstance(frame, IRModuleFrame)]
        if not frames:
            return None
        found = list((frames[-1].global_infos or {}).get("vdevice", []))
        return [entry for entry in found if isinstance(entry, tvm.relax.VDevice)]
    builder = relax.BlockBuilder.current()
    return None if builder is None else vdevices_of(builder.get())


def declared_vdevices(spec: VDeviceSpec) -> list[tvm.relax.VDevice]:
    """Vdevices of the module under construction, in which `spec` is to be found.

    Raises
    ------
    VDeviceError
        If no module is under construction.
    """
    vdevices = vdevices_under_construction()
    if vdevices is None:
        raise VDeviceError(
            f"vdevice {spec!r} is looked up in the module under construction, and there is none: use it inside an "
            "@I.ir_module class or the function scope of relax.BlockBuilder(mod)"
        )
    return vdevices


def resolve(spec: VDeviceSpec) -> tvm.relax.VDevice:
    """Look `spec` up among the vdevices of the module under construction.

    Raises
    ------
    VDeviceError
        If no module is under construction, or its vdevices do not include `spec`.
    """
    return lookup(spec, declared_vdevices(spec))


def bind(expr: relax.Expr, op_name: str) -> relax.Expr:
    """A variable bound to `expr` in the function under construction; variables are returned as they are.

    Raises
    ------
    PlacementError
        If there is no function to emit the binding into.
    """
    if isinstance(expr, relax.Var):
        return expr
    if IRBuilder.is_in_scope():
        return relax_builder.emit(expr)
    builder = relax.BlockBuilder.current()
    if builder is None:
        raise PlacementError(f"{op_name} needs a variable here, got the unbound expression {expr}; emit it first")
    return builder.emit(expr)


def can_bind() -> bool:
    """Whether `bind` has a function to emit into."""
    return IRBuilder.is_in_scope() or relax.BlockBuilder.current() is not None
