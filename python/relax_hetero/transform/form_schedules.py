"""FormSchedules: a function that uses several devices gets a schedule, by which its work can overlap.

Before::

    def main(x: llvm:0):
        a = R.call_tir(cls.f, (x,), ...llvm:0)
        b = R.to_vdevice(a, "llvm:1")
        c = R.call_tir(cls.g, (b,), ...llvm:1)
        return c

After: `main` as it was, for calls that run alone, and besides it::

    def main_step(x: llvm:0):
        a = R.call_tir(cls.f, (x,), ...llvm:0)
        return a

    def main_step_1(b: llvm:1): ...

with a schedule (`vm.schedule.Schedule`) among the module's attributes: run ``main_step``, take its result to llvm:1,
run ``main_step_1``. A step is all work on one device that has the same transfers before and after it (`crossings`): it
begins with the first and ends with the last of its kernels, and neither waits for what the other does not need.

Control flow, calls of functions and of the user's packed functions are steps of their own, which hold every device
that they may use. A function with checks of shapes, local functions or effects has no schedule, and none has in a
module that writes in place: there what runs later must not run earlier. Such functions go through the queues whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from ..vdevice import host_vdevice, vdevice_index, vdevices_of
from ..vm.schedule import Results, Schedule, Step
from .bind_targets import call_vdevice
from .blocks import renamed, used_vars
from .crossings import Around, crossings, is_transfer
from .lower_transfers import writes_in_place
from .rewriting import copy_module, fresh_global_var, op_name, relax_functions, tensor_types, typed, walk_bindings
from .stage import SCHEDULES, is_lowered


def FormSchedules() -> tvm.transform.Pass:
    """Give functions that use several devices a schedule, and a function for each of its steps.

    Returns
    -------
    tvm.transform.Pass
        A lowered module is returned as it is, and so is one with schedules.
    """

    @tvm.transform.module_pass(opt_level=0, name="FormSchedules")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return form_schedules(mod)

    return run


def form_schedules(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    vdevices = vdevices_of(mod)
    if is_lowered(mod) or len(vdevices) <= 1 or (mod.attrs and SCHEDULES in mod.attrs) or writes_in_place(mod):
        return mod
    taken = {gv.name_hint for gv in mod.get_global_vars()}
    functions = dict(mod.functions.items())
    schedules: list[Schedule] = []
    for gv, func in relax_functions(mod):
        if "global_symbol" in func.attrs and _can_be_cut(func):
            cutter = _Cutter(gv.name_hint, func, vdevices, taken)
            if cutter.device_count() > 1:
                with suppress(_NoScheduleError):
                    schedules.append(cutter.schedule())
                    functions.update(cutter.functions)
    if not schedules:
        return mod
    text = json.dumps([schedule.to_json() for schedule in schedules])
    return copy_module(mod, functions).with_attr(SCHEDULES, text)


def schedules_of(mod: tvm.IRModule) -> list[Schedule]:
    """The schedules of a module that FormSchedules was applied to, or of what became of it."""
    text = mod.attrs[SCHEDULES] if mod.attrs and SCHEDULES in mod.attrs else "[]"
    return [Schedule.from_json(data) for data in json.loads(text)]


_VIEW = "relax.reshape"
_CALL_PACKED = ("relax.call_packed", "relax.call_pure_packed", "relax.call_dps_packed", "relax.invoke_closure")


def _is_free(value: relax.Expr) -> bool:
    """Whether a value costs nothing: it names, groups or views others, or is a shape or a number."""
    return not isinstance(value, (relax.Call, relax.If, relax.Function)) or op_name(value) == _VIEW


def _calls_packed(value: relax.Expr) -> bool:
    return op_name(value) in _CALL_PACKED


def _can_be_cut(func: relax.Function) -> bool:
    bindings = list(walk_bindings(func.body, nested=False))
    plain = all(isinstance(b, relax.VarBinding) and not isinstance(b.value, relax.Function) for b in bindings)
    return bool(func.is_pure) and plain and isinstance(func.body, relax.SeqExpr)


def _vars_in(result: Any) -> Iterator[relax.Var]:
    if isinstance(result, list):
        for part in result:
            yield from _vars_in(part)
    else:
        yield result


@dataclass
class _Part:
    """Bindings that become a step.

    Attributes
    ----------
    devices : tuple of int
        What it uses, that of its queue first.
    members : list of int
        Indices of its bindings.
    after : int
        The transfers that wait for it, as bits.
    """

    devices: tuple[int, ...]
    members: list[int] = field(default_factory=list)
    after: int = 0


class _NoScheduleError(Exception):
    """A result that no step makes."""


class _Cutter:
    """Cuts one function into steps.

    Bindings that cost nothing (other names, tuples and their fields, shapes) belong to the work whose result they show,
    or else to nobody: whatever uses those has a copy.
    """

    def __init__(self, name: str, func: relax.Function, vdevices: list[relax.VDevice], taken: set[str]) -> None:
        self.functions: dict[tvm.ir.GlobalVar, relax.Function] = {}
        self._name, self._func, self._vdevices, self._taken = name, func, vdevices, taken
        host = host_vdevice(vdevices)
        self._host = vdevice_index(host, vdevices) if host is not None else -1
        self._bindings = list(walk_bindings(func.body, nested=False))
        self._position = {binding.var: index for index, binding in enumerate(self._bindings)}
        self._parts: list[_Part] = []
        self._part_of: dict[int, int] = {}
        self._numbers: dict[relax.Var, int] = {param: index for index, param in enumerate(func.params)}
        self._cut()

    def device_count(self) -> int:
        """How many devices the function uses."""
        return len({device for part in self._parts for device in part.devices})

    def schedule(self) -> Schedule:
        """The schedule; the functions of its steps are in `functions` then."""
        result = self._result_vars(self._func.body.body)
        wanted = {var for part in self._parts for var in self._reads(part)} | set(_vars_in(result))
        steps = [self._step(part, wanted) for part in self._in_order()]
        results = self._number_all(result)
        return Schedule(
            self._name, len(self._func.params), len(self._numbers), tuple(step for step in steps if step), results
        )

    def _cut(self) -> None:
        around = crossings(self._bindings, self._stands_apart)
        opened: dict[tuple[int, Around], int] = {}
        for index, binding in enumerate(self._bindings):
            if _is_free(binding.value) and self._follows(index):
                continue
            if self._stands_apart(binding):
                number = self._open(self._devices_of(binding))
            else:
                kind = (self._device(binding.value), around[index])
                if kind not in opened:
                    opened[kind] = self._open((kind[0],))
                number = opened[kind]
            self._join(number, index)
            self._parts[number].after = around[index][1]

    def _open(self, devices: tuple[int, ...]) -> int:
        self._parts.append(_Part(devices))
        return len(self._parts) - 1

    def _join(self, number: int, index: int) -> None:
        self._parts[number].members.append(index)
        self._part_of[index] = number

    def _follows(self, index: int) -> bool:
        """Have what costs nothing follow the work that it shows the result of; False for work after all."""
        value = self._bindings[index].value
        sources = {self._part_of.get(self._position.get(var, -1)) for var in used_vars(value)}
        source = sources.pop() if len(sources) == 1 else None
        if source is not None and not self._stands_apart(self._bindings[self._parts[source].members[0]]):
            self._join(source, index)
            return True
        return op_name(value) != _VIEW

    def _stands_apart(self, binding: relax.Binding) -> bool:
        """Whether a binding is a step of its own: a transfer, control flow, a call of a function."""
        value = binding.value
        if is_transfer(binding) or isinstance(value, relax.If):
            return True
        return isinstance(value, relax.Call) and not isinstance(value.op, tvm.ir.Op) or _calls_packed(value)

    def _device(self, value: relax.Expr) -> int:
        vdevice = call_vdevice(value) if isinstance(value, relax.Call) else None
        return vdevice_index(vdevice, self._vdevices) if vdevice is not None else self._host

    def _devices_of(self, binding: relax.Binding) -> tuple[int, ...]:
        """The devices of something that stands apart, the one whose queue runs it first."""
        value = binding.value
        found = [*self._devices_in(binding.var.ty)]
        if isinstance(value, relax.If):
            for branch in (value.true_branch, value.false_branch):
                for inner in walk_bindings(branch):
                    found += self._devices_in(inner.var.ty)
        else:
            for operand in value.args:
                found += self._devices_in(operand.ty)
        if not is_transfer(binding):  # a function may do what it likes, wherever it likes
            found += [*range(len(self._vdevices)), self._host]
        return tuple(dict.fromkeys(found))

    def _devices_in(self, ty: tvm.ir.Type) -> list[int]:
        return [vdevice_index(t.vdevice, self._vdevices) for t in tensor_types(ty) if t.vdevice is not None]

    def _in_order(self) -> list[_Part]:
        """Parts so that each follows what it reads; of those that may be next, one that transfers wait for."""
        waits = [self._waits_for(number) for number in range(len(self._parts))]
        left = list(range(len(self._parts)))
        order: list[int] = []
        while left:
            ready = [number for number in left if waits[number].isdisjoint(left)]
            best = min(ready, key=lambda number: (self._parts[number].after == 0, number))
            left.remove(best)
            order.append(best)
        return [self._parts[number] for number in order]

    def _waits_for(self, number: int) -> set[int]:
        makers = {self._part_of.get(self._position.get(var, -1)) for var in self._reads(self._parts[number])}
        return {maker for maker in makers if maker is not None and maker != number}

    def _closed(self, part: _Part) -> list[int]:
        """A part's bindings, and those of nobody that it uses, in order."""
        found = set(part.members)
        pending = list(part.members)
        while pending:
            for var in used_vars(self._bindings[pending.pop()].value):
                index = self._position.get(var)
                if index is not None and index not in self._part_of and index not in found:
                    found.add(index)
                    pending.append(index)
        return sorted(found)

    def _reads(self, part: _Part) -> list[relax.Var]:
        """The variables that a part takes from others."""
        bindings = [self._bindings[index] for index in self._closed(part)]
        inside = {binding.var for binding in bindings}
        read = dict.fromkeys(var for binding in bindings for var in used_vars(binding.value))
        return [var for var in read if var not in inside]

    def _step(self, part: _Part, wanted: set[relax.Var]) -> Step | None:
        bindings = [self._bindings[index] for index in self._closed(part)]
        first, reads = bindings[0], self._reads(part)
        if len(bindings) == 1 and is_transfer(first) and isinstance(first.value.args[0], relax.Var):
            source = next(iter(self._devices_in(first.value.args[0].ty)), self._host)
            return Step(part.devices[0], self._number_each(reads), self._number_each([first.var]), source=source)
        makes = [self._bindings[index].var for index in part.members if self._bindings[index].var in wanted]
        if not makes:
            return None
        gv = fresh_global_var(f"{self._name}_step", tvm.ir.Type.missing(), self._taken)
        func, sizes = step_function(bindings, reads, makes)
        self.functions[typed(gv, func.ty)] = func
        return Step(
            part.devices[0],
            self._number_each(reads),
            self._number_each(makes),
            function=gv.name_hint,
            sizes=sizes,
            also=part.devices[1:],
        )

    def _number_each(self, variables: Iterable[relax.Var]) -> tuple[int, ...]:
        return tuple(self._numbers.setdefault(var, len(self._numbers)) for var in variables)

    def _result_vars(self, expr: relax.Expr) -> Any:
        """Results as variables that parameters are or parts make, in nested lists for tuples."""
        if isinstance(expr, relax.Tuple):
            return [self._result_vars(part) for part in expr.fields]
        if not isinstance(expr, relax.Var):
            raise _NoScheduleError
        index = self._position.get(expr)
        if index is None or index in self._part_of:
            return expr
        return self._result_vars(self._bindings[index].value)

    def _number_all(self, result: Any) -> Results:
        if isinstance(result, list):
            return tuple(map(self._number_all, result))
        return self._number_each([result])[0]


def step_function(
    bindings: list[relax.Binding], reads: list[relax.Var], makes: list[relax.Var]
) -> tuple[relax.Function, tuple[str, ...]]:
    """A function of some bindings of another one.

    Parameters
    ----------
    bindings : list of relax.VarBinding
        In order.
    reads, makes : list of relax.Var
        What becomes its parameters and its results: a tuple unless it is one.

    Returns
    -------
    relax.Function
        Private. Its last parameter is a shape, if there are symbolic sizes that its tensors do not give.
    tuple of str
        The names of these sizes.
    """
    names: dict[relax.Var, relax.Expr] = {var: relax.Var(var.name, var.ty) for var in reads}
    params = list(names.values())
    copies: list[relax.Binding] = []
    for binding in bindings:
        copy = renamed(binding, names)
        var = (relax.Var if binding.var in makes else relax.DataflowVar)(binding.var.name, binding.var.ty)
        names[binding.var] = var
        copies.append(relax.VarBinding(var, copy.value, binding.span))
    results = [names[var] for var in makes]
    ty = results[0].ty if len(results) == 1 else tvm.ir.TupleType([var.ty for var in results])
    has_block = any(isinstance(binding.value, relax.If) for binding in bindings)  # not allowed among dataflow
    block = (_plain_block if has_block else relax.DataflowBlock)(copies)
    value = results[0] if len(results) == 1 else relax.Tuple(results)
    body = typed(relax.SeqExpr([block], value), ty)
    func = relax.Function(params, body, ty, is_pure=True)
    sizes = sorted(relax.analysis.free_symbolic_vars(func), key=lambda var: str(var.name))
    if sizes:
        params = [*params, relax.Var("sizes", relax.ShapeType(sizes))]
        func = relax.Function(params, body, ty, is_pure=True)
    return func, tuple(str(var.name) for var in sizes)


def _plain_block(bindings: list[relax.Binding]) -> relax.BindingBlock:
    """A block that is no dataflow block, and has no variables of such."""
    plain = {b.var: relax.Var(b.var.name, b.var.ty) for b in bindings if isinstance(b.var, relax.DataflowVar)}
    return relax.BindingBlock([relax.VarBinding(plain.get(b.var, b.var), renamed(b, plain).value) for b in bindings])
