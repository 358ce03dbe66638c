"""Where the bindings of a function do their work, and what they use there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import tvm
from tvm import relax

from ...target.vdevice import host_vdevice, vdevice_index, vdevices_of
from ..ir.blocks import used_vars
from ..ir.kernels import call_vdevice
from ..ir.op_names import IN_PLACE, RESHAPE
from ..ir.rewriting import global_vars_in, op_name, tensor_types, walk_bindings
from .transfer_dependences import is_transfer
from .written_arguments import overwritten

_ANYWHERE = ("relax.invoke_closure", "relax.invoke_pure_closure", "relax.make_closure")

CALLS = (
    *_ANYWHERE,
    "relax.call_pure_packed",
    "relax.call_dps_packed",
    "relax.call_inplace_packed",
    "relax.call_builtin_with_ctx",
    "relax.call_py_func",
)
"""Ops that run what is not seen in the op itself."""


@dataclass
class _Uses:
    """What code uses itself: devices, functions of the module, and whether it writes in place."""

    devices: set[int] = field(default_factory=set)
    functions: set[tvm.ir.GlobalVar] = field(default_factory=set)
    writes: bool = False


class BindingDevices:
    """The devices that bindings of a module use.

    Parameters
    ----------
    mod : tvm.IRModule
        Placed.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._vdevices = vdevices_of(mod)
        host = host_vdevice(self._vdevices)
        self.host = vdevice_index(host, self._vdevices) if host is not None else -1
        self._of_functions: dict[tvm.ir.GlobalVar, _Uses] = {}

    def is_free(self, binding: relax.Binding) -> bool:
        """Whether a binding costs nothing: it names, groups or views others, or is a shape or a number."""
        value = binding.value
        return not isinstance(value, (relax.Call, relax.If, relax.Function)) or op_name(value) == RESHAPE

    def device(self, value: relax.Expr) -> int:
        """The device that an op works on, or that a value is on: manifest index, -1 for the implicit host."""
        vdevice = call_vdevice(value) if isinstance(value, relax.Call) else None
        if vdevice is None:
            vdevice = next((t.vdevice for t in tensor_types(value.ty) if t.vdevice is not None), None)
        return vdevice_index(vdevice, self._vdevices) if vdevice is not None else self.host

    def devices(self, binding: relax.Binding) -> tuple[int, ...]:
        """The devices that a binding uses, the one whose queue runs it first.

        Functions of the module use what is written in them, the user's own packed functions the devices of the tensors
        that they take and give, and closures may use any.
        """
        value = binding.value
        if is_transfer(binding):
            return tuple(dict.fromkeys([vdevice_index(value.attrs.dst_vdevice, self._vdevices), *self._in(value.args)]))
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and op_name(value) not in CALLS:
            return (self.device(value),)
        found = [*self._in([binding.var]), *sorted(self._used_by(binding))]
        return tuple(dict.fromkeys(found)) or (self.host,)

    def _in(self, values: Iterable[relax.Expr]) -> Iterator[int]:
        for value in values:
            for ty in tensor_types(value.ty):
                if ty.vdevice is not None:
                    yield vdevice_index(ty.vdevice, self._vdevices)

    def writes_what_others_see(self, function: relax.Function) -> bool:
        """Whether a function may overwrite a tensor that something else of it reads.

        It does not where the tensor is a parameter, which is the call's own then, or comes out of a kernel, and nothing
        but the work that overwrites it uses it.
        """
        own = list(walk_bindings(function.body, nested=False))
        made = {binding.var for binding in own if op_name(binding.value) == "relax.call_tir"} | {*function.params}
        uses = Counter(var for value in (*(b.value for b in own), function.body.body) for var in used_vars(value))
        writers = [binding.value for binding in own if op_name(binding.value) in IN_PLACE]
        if any(var not in made or uses[var] > 1 for value in writers for var in overwritten(value, set())):
            return True
        own_uses = self._uses(binding for binding in walk_bindings(function.body) if binding.value not in writers)
        return any(uses.writes for uses in self._reached(own_uses))

    def _used_by(self, binding: relax.Binding) -> set[int]:
        """The devices that a binding and all that it calls use."""
        inside = walk_bindings(relax.SeqExpr([relax.BindingBlock([binding])], relax.Tuple([])))
        return {device for uses in self._reached(self._uses(inside)) for device in uses.devices}

    def _reached(self, own: _Uses) -> Iterator[_Uses]:
        """What code and each function that it calls use."""
        yield own
        seen: set[tvm.ir.GlobalVar] = set()
        pending = list(own.functions)
        while pending:
            callee = pending.pop()
            if callee not in seen:
                seen.add(callee)
                if callee not in self._of_functions:
                    self._of_functions[callee] = self._uses(walk_bindings(self._mod.functions[callee].body))
                yield self._of_functions[callee]
                pending += self._of_functions[callee].functions

    def _uses(self, bindings: Iterable[relax.Binding]) -> _Uses:
        found = _Uses()
        for binding in bindings:
            value = binding.value
            found.devices.update(self._in([binding.var]))
            found.writes = found.writes or op_name(value) in IN_PLACE
            if isinstance(value, relax.Call):
                found.devices.update(self._in(value.args))
                callees = global_vars_in(value)
                found.functions.update(gv for gv in callees if isinstance(self._mod.functions.get(gv), relax.Function))
                if isinstance(value.op, relax.Var) or op_name(value) in _ANYWHERE:
                    found.devices.update(range(len(self._vdevices)))
        return found
