"""How wide the vectors of a nest are, and where there can be none."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm_ffi import structural_walk

from ...encoding.machine import Machine
from .boxes import is_choice
from .flat import FlatBox
from .nests import Nest
from .stages import loads, variables


def lanes_of(nest: Nest, machine: Machine) -> int:
    """Elements of a vector register of the widest type that is read, computed with or stored."""
    types = {str(load.ty.dtype) for value in nest.expressions() for load in loads(value) if _is_data(load)}
    types |= {buffer.dtype for buffer in nest.made}
    types -= {"bool"}
    return min((machine.lanes(dtype) for dtype in types), default=machine.lanes("int8"))


def _is_data(load: tirx.Expr) -> bool:
    return True


def varies_inside(box: FlatBox, var: tirx.Var) -> bool:
    """Whether a choice of one of two values hangs on a variable: the lanes of a vector cannot choose alone."""
    found = False

    def on_call(call: tvm.ir.Call) -> None:
        nonlocal found
        found = found or (is_choice(call) and var in variables(call.args[0]))

    for value in box.nest.expressions():
        structural_walk(value, (tvm.ir.Call, on_call))
    return found
