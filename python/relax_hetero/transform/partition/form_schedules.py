"""FormSchedules: a function that uses several devices gets a schedule, so that its work can overlap.

Before::

    def main(x: llvm:0):
        a = R.call_tir(cls.f, (x,), ...llvm:0)
        b = R.to_vdevice(a, "llvm:1")
        c = R.call_tir(cls.g, (b,), ...llvm:1)
        return c

After, besides the unchanged `main`, which serves calls without overlap::

    def main_step(x: llvm:0):
        a = R.call_tir(cls.f, (x,), ...llvm:0)
        return a

    def main_step_1(b: llvm:1): ...

with a schedule (`artifact.schedule.Schedule`) among the module's attributes: run ``main_step``, transfer its result to
llvm:1, run ``main_step_1``. A step is a part of the function (`device_partition`), whose kernels all wait for the same
transfers. Control flow, calls of functions and of the user's packed functions are steps of their own, which occupy
every device that they may use. A function that uses one of the module's devices is a single step, itself, so that
other devices stay free.

The first steps check the function's requirements on the sizes of its parameters. Functions with other checks of shapes,
local functions or side effects, and those that overwrite tensors with other readers, or call a function that writes in
place, have no schedule, as their order must not change. Neither do functions whose kernels on several GPUs wait for
each other, which one thread has to launch. They enter the queues as a whole.

Assumes FormDispatches, and FormCommandBuffers if command buffers are used. A lowered module is returned as it is,
and so is a module with schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tvm
from tvm import relax

from ...artifact.nccl_layout import NCCL_MEMORY
from ...artifact.peer_layout import PEER_MEMORY
from ...artifact.schedule import Results, Schedule, Step
from ...target.vdevice import vdevices_of
from ..ir.blocks import renamed, used_vars
from ..ir.declare import declare_pass
from ..ir.module_attrs import is_lowered
from ..ir.remarks import remarks_of, with_remarks
from ..ir.requirements import requirement_positions
from ..ir.rewriting import (
    copy_module,
    fresh_global_var,
    global_vars_in,
    op_name,
    rebound,
    relax_functions,
    typed,
    walk_bindings,
    with_fresh_sizes,
)
from .device_partition import BindingDevices, DevicePartition, Part, is_transfer


def form_schedules(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    if is_lowered(mod) or len(vdevices_of(mod)) <= 1 or remarks_of(mod).schedules is not None:
        return mod
    devices = BindingDevices(mod)
    used_names = {gv.name_hint for gv in mod.get_global_vars()}
    functions = dict(mod.functions.items())
    schedules: list[Schedule] = []
    for gv, func in relax_functions(mod):
        if "global_symbol" in func.attrs and _can_be_cut(func) and not devices.has_visible_writes(func):
            cutter = _Cutter(gv.name_hint, func, devices, used_names)
            schedules.append(cutter.schedule())
            functions.update(cutter.functions)
    return mod if not schedules else with_remarks(copy_module(mod, functions), schedules=schedules)


FormSchedules = declare_pass("FormSchedules", form_schedules)


def schedules_of(mod: tvm.IRModule) -> list[Schedule]:
    """The schedules of a module after FormSchedules."""
    return list(remarks_of(mod).schedules or ())


def _can_be_cut(func: relax.Function) -> bool:
    bindings = list(walk_bindings(func.body, nested=False))
    positions = requirement_positions(bindings)
    bindings = [binding for position, binding in enumerate(bindings) if position not in positions]
    is_plain = all(isinstance(b, relax.VarBinding) and not isinstance(b.value, relax.Function) for b in bindings)
    return bool(func.is_pure) and is_plain and isinstance(func.body, relax.SeqExpr) and not _uses_peers(bindings)


def _uses_peers(bindings: Sequence[relax.Binding]) -> bool:
    """Return whether kernels of several GPUs wait for each other, so that one thread has to launch them all."""
    return any(
        op_name(binding.value) == "relax.call_pure_packed"
        and isinstance(binding.value.args[0], relax.ExternFunc)
        and str(binding.value.args[0].global_symbol) in (NCCL_MEMORY, PEER_MEMORY)
        for binding in bindings
    )


class _Cutter:
    """Cuts one function into steps."""

    def __init__(self, name: str, func: relax.Function, devices: BindingDevices, used_names: set[str]) -> None:
        self.functions: dict[tvm.ir.GlobalVar, relax.Function] = {}  # functions of the steps, after `schedule`
        self._name, self._func, self._devices, self._used_names = name, func, devices, used_names
        bindings = list(walk_bindings(func.body, nested=False))
        positions = requirement_positions(bindings)
        self._required = [binding for position, binding in enumerate(bindings) if position in positions]
        work = [binding for position, binding in enumerate(bindings) if position not in positions]
        self._parts = DevicePartition(work, devices)
        self._bindings = self._parts.bindings
        self._position = {binding.var: index for index, binding in enumerate(self._bindings)}
        self._inputs: dict[relax.Var, int] = {param: index for index, param in enumerate(func.params)}
        self._numbers = dict(self._inputs)

    def schedule(self) -> Schedule:
        """Make the schedule, and the functions of its steps."""
        inputs = len(self._func.params)
        used = {device for part in self._parts.parts.values() for device in part.devices}
        if len(used) <= 1:
            device = min(used, default=self._devices.device(self._func.body.body))
            bindings = walk_bindings(self._func.body, nested=False)
            names = tuple(name for binding in bindings for name in _callees(binding.value))
            step = Step(device, tuple(range(inputs)), (inputs,), self._name, calls=names)
            return Schedule(self._name, inputs, inputs + 1, (step,), inputs)
        result = self._resolved(self._func.body.body)
        parts = self._needed_parts(result)
        needed = {var for part in parts for var in self._reads(part)} | set(_vars_in(result))
        steps = tuple(self._step(part, needed) for part in parts)
        results = self._number_all(result)
        return Schedule(self._name, inputs, len(self._numbers), steps, results)

    def _needed_parts(self, result: Any) -> list[Part]:
        """The parts that results need, in the order of their steps."""
        parts, part_of = self._parts.parts, self._parts.part_of
        needed: set[int] = set()
        pending = list(_vars_in(result))
        while pending:
            number = part_of.get(self._position.get(pending.pop(), -1))
            if number is not None and number not in needed:
                needed.add(number)
                pending += self._reads(parts[number])
        return [parts[number] for number in self._parts.topological_order() if number in needed]

    def _closed(self, part: Part) -> list[int]:
        """A part's bindings, and the bindings without a part that it uses, in order."""
        indices = set(part.members)
        pending = list(part.members)
        while pending:
            for var in used_vars(self._bindings[pending.pop()].value):
                index = self._position.get(var)
                if index is not None and index not in self._parts.part_of and index not in indices:
                    indices.add(index)
                    pending.append(index)
        return sorted(indices)

    def _reads(self, part: Part) -> list[relax.Var]:
        """The variables that a part reads from other parts."""
        bindings = [self._bindings[index] for index in self._closed(part)]
        inside = {binding.var for binding in bindings}
        read = dict.fromkeys(var for binding in bindings for var in used_vars(binding.value))
        # The remaining ones are symbolic sizes that kernels take as numbers.
        return [var for var in read if var not in inside and (var in self._position or var in self._inputs)]

    def _step(self, part: Part, needed: set[relax.Var]) -> Step:
        bindings = [self._bindings[index] for index in self._closed(part)]
        first, reads = bindings[0], self._reads(part)
        if len(bindings) == 1 and is_transfer(first) and isinstance(first.value.args[0], relax.Var):
            source = self._devices.device(first.value.args[0])
            return Step(part.devices[0], self._number_each(reads), self._number_each([first.var]), source=source)
        makes = [self._bindings[index].var for index in part.members if self._bindings[index].var in needed]
        gv = fresh_global_var(f"{self._name}_step", tvm.ir.Type.missing(), self._used_names)
        # Requirements are checked by the steps that read no results of other steps.
        required = [] if any(self._is_computed(var) for var in reads) else self._required
        func, sizes = step_function([*required, *bindings], reads, makes)
        self.functions[typed(gv, func.ty)] = func
        return Step(
            part.devices[0],
            self._number_each(reads),
            self._number_each(makes),
            function=gv.name_hint,
            sizes=sizes,
            other_devices=part.devices[1:],
            calls=tuple(name for binding in bindings for name in _callees(binding.value)),
        )

    def _is_computed(self, var: relax.Var) -> bool:
        """Return whether a step other than a transfer defines a variable."""
        index = self._position.get(var)
        return index is not None and not is_transfer(self._bindings[index])

    def _number_each(self, variables: Iterable[relax.Var]) -> tuple[int, ...]:
        return tuple(self._numbers.setdefault(var, len(self._numbers)) for var in variables)

    def _resolved(self, expr: relax.Expr) -> Any:
        """A result as parameters and variables of parts, in nested lists for tuples."""
        if isinstance(expr, relax.Tuple):
            return [self._resolved(field) for field in expr.fields]
        if not isinstance(expr, relax.Var) or not (expr in self._position or expr in self._inputs):
            # A constant, or a symbolic size.
            var = relax.Var(f"{self._name}_result", expr.ty)
            self._position[var] = len(self._bindings)
            self._parts.bind_constant(var, expr)
            return var
        index = self._position.get(expr)
        if index is None or index in self._parts.part_of:
            return expr
        value = self._bindings[index].value
        if isinstance(value, (relax.Var, relax.Tuple)):
            return self._resolved(value)
        self._parts.add_part(index)
        return expr

    def _number_all(self, result: Any) -> Results:
        if isinstance(result, list):
            return tuple(map(self._number_all, result))
        return self._number_each([result])[0]


def _callees(value: relax.Expr) -> Iterator[str]:
    """Callees of a value by name: functions of the module, and packed functions."""
    for gv in global_vars_in(value):
        yield gv.name_hint
    if isinstance(value, relax.Call):
        for callee in (value.op, *value.args):
            if isinstance(callee, relax.ExternFunc):
                yield callee.global_symbol


def _vars_in(result: Any) -> Iterator[relax.Var]:
    if isinstance(result, list):
        for field in result:
            yield from _vars_in(field)
    else:
        yield result


def step_function(
    bindings: Sequence[relax.Binding], reads: Sequence[relax.Var], makes: Sequence[relax.Var], is_pure: bool = True
) -> tuple[relax.Function, tuple[str, ...]]:
    """A private function of some bindings of another one.

    Parameters
    ----------
    bindings : sequence of relax.Binding
        Bindings in order; without side effects, if `is_pure`.
    reads, makes : sequence of relax.Var
        Variables that become its parameters, and its result: a tuple if there are several.

    Returns
    -------
    relax.Function
        The function. Its last parameter is a shape if its tensors do not define all symbolic sizes.
    tuple of str
        The names of the sizes in that shape.
    """
    names: dict[relax.Var, relax.Expr] = {var: relax.Var(var.name, var.ty) for var in reads}
    params = list(names.values())
    is_dataflow = is_pure and not any(isinstance(binding.value, relax.If) for binding in bindings)
    copies: list[relax.Binding] = []
    for binding in bindings:
        copy = renamed(binding, names)
        is_local = is_dataflow and binding.var not in makes
        var = (relax.DataflowVar if is_local else relax.Var)(binding.var.name, binding.var.ty)
        names[binding.var] = var
        copies.append(rebound(binding, var, copy.value))
    results = [names[var] for var in makes]
    value = results[0] if len(results) == 1 else relax.Tuple(results)
    block = (relax.DataflowBlock if is_dataflow else relax.BindingBlock)(copies)
    body = typed(relax.SeqExpr([block], value), value.ty)
    func = relax.Function(params, body, value.ty, is_pure)
    sizes = sorted(relax.analysis.free_symbolic_vars(func), key=lambda var: str(var.name))
    if sizes:
        func = relax.Function([*params, relax.Var("sizes", relax.ShapeType(sizes))], body, value.ty, is_pure)
    return with_fresh_sizes(func), tuple(str(var.name) for var in sizes)
