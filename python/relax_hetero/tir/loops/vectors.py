"""How wide the vectors of a nest are, and where there can be none."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm_ffi import structural_walk

from ...target.cpu_target import Machine
from .boxes import is_choice
from .flat import FlatBox
from .nests import Nest
from .stages import loads, variables


def lanes_of(nest: Nest, machine: Machine) -> int:
    """Elements of a vector register of the widest type that is read, computed with or stored."""
    types = {str(load.ty.dtype) for value in nest.expressions() for load in loads(value)}
    types |= {buffer.dtype for buffer in nest.made}
    types -= {"bool"}
    return min((machine.lanes(dtype) for dtype in types), default=machine.lanes("int8"))


def varies_inside(box: FlatBox, var: tirx.Var) -> bool:
    """Whether a choice of one of two values hangs on a variable: the lanes of a vector cannot choose alone."""
    return any(var in variables(c) for value in box.nest.expressions() for c in _choices(value))


def chooses(value: tirx.Expr) -> bool:
    """Whether an expression has choices."""
    return bool(_choices(value))


def _choices(value: tirx.Expr) -> list[tirx.Expr]:
    found: list[tirx.Expr] = []

    def on_call(call: tvm.ir.Call) -> None:
        if is_choice(call):
            found.append(call.args[0])

    structural_walk(value, (tvm.ir.Call, on_call))
    return found
