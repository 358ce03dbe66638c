"""Which bindings of a block become one command buffer: maximal runs of work on one device.

Work is a call of a kernel. What costs nothing on the way, views of what the run made and fields of it, joins. What is
not work and reads nothing of the run moves before it; what reads something of it, or may have effects, ends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx

from ..tir.raw_kernel import RawSignature, raw_signature
from ..vdevice import vdevice_index, vdevices_of
from .bind_targets import call_vdevice
from .blocks import Block, used_vars
from .rewriting import op_name, tensor_types
from .stage import COMMANDS

WORTH_A_BUFFER = 2
"""A run of fewer kernels gains nothing: one call of a buffer stands for one call of a kernel."""

_VIEW = "relax.reshape"


@dataclass
class Run:
    """Bindings that become a command buffer.

    Attributes
    ----------
    vdevice : relax.VDevice
        Where the work is done.
    members : list of int
        Indices of the bindings, in order.
    kernels : int
        How many of them call one.
    """

    vdevice: relax.VDevice
    members: list[int] = field(default_factory=list)
    kernels: int = 0


class RunFinder:
    """Cuts the blocks of a module into runs.

    Parameters
    ----------
    mod : tvm.IRModule
        Of dispatches (FormDispatches).
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._vdevices = vdevices_of(mod)
        self._signatures: dict[tvm.ir.GlobalVar, RawSignature | None] = {}

    def signature(self, kernel: tvm.ir.GlobalVar) -> RawSignature:
        """How a kernel of a run is called raw."""
        signature = self._signature(kernel)
        assert signature is not None, f"{kernel.name_hint} is no kernel of a run"
        return signature

    def _signature(self, kernel: tvm.ir.GlobalVar) -> RawSignature | None:
        if kernel not in self._signatures:
            func = self._mod.functions.get(kernel)
            fits = isinstance(func, tirx.PrimFunc) and COMMANDS not in func.attrs
            self._signatures[kernel] = raw_signature(func) if fits else None
        return self._signatures[kernel]

    def params(self, kernel: tvm.ir.GlobalVar) -> list[tirx.Var]:
        """The parameters of a kernel as `call_tir` gives them: operands, then results."""
        return list(self._mod.functions[kernel].params)

    def _index(self, vdevice: relax.VDevice) -> int:
        return vdevice_index(vdevice, self._vdevices)

    def cut(self, block: Block) -> list[int | Run]:
        """The block's bindings in a new order: indices of those that stay, and runs."""
        order: list[int | Run] = []
        run: Run | None = None
        made: set[relax.Var] = set()
        for index, binding in enumerate(block.bindings):
            work = self.work_of(binding)
            if work is not None:
                if run is None or self._index(run.vdevice) != self._index(work):
                    run, made = Run(work), set()
                    order.append(run)
                run.members.append(index)
                run.kernels += 1
                made.add(binding.var)
            elif run is not None and _is_view(binding, made):
                run.members.append(index)
                made.add(binding.var)
            elif run is not None and _may_move(binding) and not made.intersection(used_vars(binding.value)):
                order.insert(len(order) - 1, index)
            else:
                order.append(index)
                run = None
        return [part for item in order for part in _unless_small(item)]

    def work_of(self, binding: relax.Binding) -> relax.VDevice | None:
        """The device of a binding that calls a kernel a command buffer can run; None for any other."""
        call = binding.value
        if not isinstance(binding, relax.VarBinding) or op_name(call) != "relax.call_tir":
            return None
        signature = self._signature(call.args[0])
        operands = call.args[1].fields if isinstance(call.args[1], relax.Tuple) else None
        if signature is None or operands is None or not all(_is_known(ty) for ty in tensor_types(call.ty_args[0])):
            return None
        if not all(_is_number(arg) or (_is_tensor(arg) and _is_known(arg.ty)) for arg in operands):
            return None
        vdevice = call_vdevice(call)
        plain = vdevice is not None and vdevice.memory_scope == "global"
        return vdevice if plain else None


def _unless_small(item: int | Run) -> list[int | Run]:
    if isinstance(item, Run) and item.kernels < WORTH_A_BUFFER:
        return list(item.members)
    return [item]


def _is_view(binding: relax.Binding, made: set[relax.Var]) -> bool:
    """Whether a binding gives the memory of something the run made another shape or name."""
    value = binding.value
    if isinstance(value, relax.TupleGetItem):
        return value.tuple_value in made
    if op_name(value) == _VIEW:
        return value.args[0] in made and _is_known(binding.var.ty)
    return isinstance(value, relax.Var) and value in made


def _may_move(binding: relax.Binding) -> bool:
    """Whether a binding may run earlier than it stands, if what it reads is there: it has no effect, nor a check."""
    value = binding.value
    if isinstance(binding, relax.MatchCast) or isinstance(value, (relax.If, relax.Function)):
        return False
    if not isinstance(value, relax.Call):
        return True
    return isinstance(value.op, tvm.ir.Op) and bool(value.op.get_attr("FPurity"))


def _is_tensor(arg: relax.Expr) -> bool:
    is_constant = isinstance(arg, tvm.ir.GenericConst) and isinstance(arg.value, tvm.runtime.Tensor)
    return is_constant or isinstance(arg, relax.Var)


def _is_number(arg: relax.Expr) -> bool:
    return isinstance(arg.ty, tvm.ir.PrimType)


def _is_known(ty: tvm.ir.Type) -> bool:
    return isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) and ty.dtype is not None
