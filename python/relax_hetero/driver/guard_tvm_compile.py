"""`tvm.compile` with this library's pipeline is refused for several devices, instead of built for the first one.

TVM links all host kernels for one target and puts all constants on one device, silently. Importing
`relax_hetero.driver` wraps its link step with a check, and with what command buffers need there
(`with_noinline_kernels`); modules that did not go through our pipeline pass untouched.
"""

from __future__ import annotations

import functools
from typing import Any

import tvm
from tvm.relax import vm_build

from ..errors import BuildError
from ..transform.ir.module_attrs import device_count
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
            raise BuildError(
                f"tvm.compile links for one target and one device, and this module has {devices} vdevices: "
                "expected relax_hetero.compile(mod), which builds each device's kernels for its own target"
            )
        if tir_mod is not None:
            tir_mod = with_noinline_kernels(tir_mod)
        return stock(builder, target, tir_mod, *args, **kwargs)

    checked.guarded_by_relax_hetero = True  # type: ignore[attr-defined]
    vm_build._vmlink = checked
