"""Guard that makes `tvm.compile` refuse modules on several devices, with any pipeline.

TVM silently links all host kernels for one target and puts all constants on one device, so that a model on two devices
fails in a kernel when it is called. Importing `relax_hetero.driver.compile` adds a check to TVM's code generation and
its link step, and to the latter `with_noinline_kernels`, which command buffers need. Modules on one device are not
affected.
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
    def checked_link(builder: Any, target: Any, tir_mod: tvm.IRModule | None = None, *args: Any, **kwargs: Any) -> Any:
        devices = device_count(tir_mod) if tir_mod is not None else 0
        if devices > 1:
            raise _error(devices)
        if tir_mod is not None:
            tir_mod = with_noinline_kernels(tir_mod)
        return stock(builder, target, tir_mod, *args, **kwargs)

    checked_link.guarded_by_relax_hetero = True  # type: ignore[attr-defined]
    vm_build._vmlink = checked_link
    stock_codegen = vm_build._vmcodegen

    @functools.wraps(stock_codegen)
    def checked_codegen(builder: Any, mod: tvm.IRModule, *args: Any, **kwargs: Any) -> Any:
        # The link step checks lowered modules, and `rh.compile` links by itself.
        if not is_lowered(mod) and (devices := devices_in_use(mod)) > 1:
            raise _error(devices)
        return stock_codegen(builder, mod, *args, **kwargs)

    vm_build._vmcodegen = checked_codegen


def devices_in_use(mod: tvm.IRModule) -> int:
    """The number of vdevices that the types of a module's variables name."""
    vdevices: set[int] = set()
    for _, func in relax_functions(mod):
        types = [func.ret_ty, *(param.ty for param in func.params), *(b.var.ty for b in walk_bindings(func))]
        vdevices.update(handle(t.vdevice) for ty in types for t in tensor_types(ty) if t.vdevice is not None)
    return len(vdevices)


def _error(devices: int) -> BuildError:
    return BuildError(
        f"tvm.compile links for one target and one device, and this module has {devices} vdevices: "
        "expected relax_hetero.compile(mod), which builds each device's kernels for its own target"
    )
