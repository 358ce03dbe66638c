"""`tvm.compile` is refused for several devices, whatever its pipeline, instead of built for the first one.

TVM links all host kernels for one target and puts all constants on one device, silently: a model on two devices fails
in a kernel when it is called. Importing `relax_hetero.driver` wraps TVM's code generation and its link step with a
check, and the link step with what command buffers need there (`with_noinline_kernels`). Modules with values on one
device pass untouched.
"""

from __future__ import annotations

import functools
from typing import Any

import tvm
from tvm.relax import vm_build

from ..errors import BuildError
from ..transform.ir.module_attrs import device_count, is_lowered
from ..transform.ir.rewriting import handle, relax_functions, tensor_types, walk_bindings
from .link.address_table import with_noinline_kernels


def install() -> None:
    """Wrap TVM's link step, once."""
    stock = vm_build._vmlink
    if getattr(stock, "guarded_by_relax_hetero", False):
        return

    @functools.wraps(stock)
    def checked(builder: Any, target: Any, tir_mod: tvm.IRModule | None = None, *args: Any, **kwargs: Any) -> Any:
        devices = device_count(tir_mod) if tir_mod is not None else 0
        if devices > 1:
            raise _refused(devices)
        if tir_mod is not None:
            tir_mod = with_noinline_kernels(tir_mod)
        return stock(builder, target, tir_mod, *args, **kwargs)

    checked.guarded_by_relax_hetero = True  # type: ignore[attr-defined]
    vm_build._vmlink = checked
    stock_codegen = vm_build._vmcodegen

    @functools.wraps(stock_codegen)
    def checked_codegen(builder: Any, mod: tvm.IRModule, *args: Any, **kwargs: Any) -> Any:
        # The link step counts the devices of modules that went through our pipeline, and `rh.compile` has its own.
        if not is_lowered(mod) and (devices := devices_in_use(mod)) > 1:
            raise _refused(devices)
        return stock_codegen(builder, mod, *args, **kwargs)

    vm_build._vmcodegen = checked_codegen


def devices_in_use(mod: tvm.IRModule) -> int:
    """How many vdevices of a module its values are on; those that no variable names are not counted."""
    found: set[int] = set()
    for _, func in relax_functions(mod):
        types = [func.ret_ty, *(param.ty for param in func.params), *(b.var.ty for b in walk_bindings(func))]
        found.update(handle(t.vdevice) for ty in types for t in tensor_types(ty) if t.vdevice is not None)
    return len(found)


def _refused(devices: int) -> BuildError:
    return BuildError(
        f"tvm.compile links for one target and one device, and this module has {devices} vdevices: "
        "expected relax_hetero.compile(mod), which builds each device's kernels for its own target"
    )
