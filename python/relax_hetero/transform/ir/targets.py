"""The target that code of a value is made for."""

from __future__ import annotations

import tvm
from tvm import relax

from ...target.native_target import native


def target_of(vdevice: relax.VDevice | None) -> tvm.target.Target:
    """The target of a device; without devices TVM's current one, else this CPU's."""
    if vdevice is not None:
        return vdevice.target
    return tvm.target.Target.current(allow_none=True) or native("llvm")
