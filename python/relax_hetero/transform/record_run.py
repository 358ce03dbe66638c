"""A run of kernels becomes a command buffer: what it reads and gives, where its transient values lie, its commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map, structural_walk

from ..tir.command_list import Address, Call, Tensor, host_function
from .blocks import Block
from .command_regions import Run, RunFinder
from .plan_arena import Lifetime, plan_arena
from .rewriting import op_name, tensor_types, typed


@dataclass(eq=False)
class Value:
    """A tensor that a run reads or makes.

    Attributes
    ----------
    ty : relax.TensorType
    name : str
    begin, end : int
        The command that makes it and the last one that reads it.
    is_result : bool
        Whether something after the run reads it.
    offset : int or tirx.Expr
        Of its first byte in the arena, if it lies there.
    """

    ty: relax.TensorType
    name: str
    begin: int = 0
    end: int = 0
    is_result: bool = False
    offset: Any = 0

    @property
    def dtype(self) -> str:
        """TVM's name of its element type."""
        return str(self.ty.dtype.dtype)

    @property
    def shape(self) -> list[Any]:
        """Its extents."""
        return list(self.ty.shape.values)

    @property
    def nbytes(self) -> Any:
        """Its size: an int, or an expression."""
        dtype = tvm.DataType(self.dtype)
        count: Any = (dtype.bits * dtype.lanes + 7) // 8
        for extent in self.shape:
            count = count * (int(extent) if isinstance(extent, tirx.IntImm) else extent)
        return count


@dataclass(frozen=True)
class Step:
    """A call of a kernel in a run; `scalars` are those of its `RawSignature`."""

    kernel: tvm.ir.GlobalVar
    operands: tuple[Value, ...]
    scalars: tuple[Any, ...]
    variable: str


@dataclass
class Recorded:
    """A command buffer, to be written once the kernels' raw names are known.

    Attributes
    ----------
    gv : tvm.ir.GlobalVar
        The host function's.
    function : str
        The Relax function it was cut from.
    vdevice : relax.VDevice
    inputs, constants, results : list of Value
        Its tensor parameters, in this order, with `numbers` before the results, and the arena after them.
    numbers : list of tirx.Var
        The symbols that the call passes, since no tensor's extents say them.
    arena : int or tirx.Expr
        Bytes; 0 for none.
    steps : list of Step
    """

    gv: tvm.ir.GlobalVar
    function: str
    vdevice: relax.VDevice
    inputs: list[Value]
    constants: list[Value]
    results: list[Value]
    numbers: list[tirx.Var]
    arena: Any
    steps: list[Step]

    @property
    def kernels(self) -> list[tvm.ir.GlobalVar]:
        """The kernels, in order of first use."""
        return list(dict.fromkeys(step.kernel for step in self.steps))

    @property
    def has_arena(self) -> bool:
        """Whether any value is transient."""
        return not (isinstance(self.arena, int) and self.arena == 0)

    def symbols(self) -> list[tirx.Var]:
        """The symbolic extents that anything in it depends on."""
        found: dict[tirx.Var, None] = {}
        for expr in self._expressions():
            if isinstance(expr, tirx.Expr):
                structural_walk(expr, (tvm.ir.Var, lambda var: found.setdefault(var)))
        return list(found)

    def _expressions(self) -> Iterator[Any]:
        for value in (*self.inputs, *self.constants, *self.results):
            yield from value.shape
        for step in self.steps:
            yield from step.scalars
            yield from (value.offset for value in step.operands)
        yield self.arena

    def host_function(self, raw: Mapping[tvm.ir.GlobalVar, tvm.ir.GlobalVar]) -> tirx.PrimFunc:
        """The PrimFunc that runs the steps, which calls kernels by their raw names."""
        own = {symbol: tirx.Var(symbol.name, symbol.ty) for symbol in self.symbols()}

        def renamed(expr: Any) -> Any:
            if not isinstance(expr, tirx.Expr):
                return expr
            return structural_map(expr, (tvm.ir.Var, lambda var: own.get(var, var)))

        tensors = [*self.inputs, *self.constants, *self.results]
        params: list[Any] = [Tensor(v.name, [renamed(e) for e in v.shape], v.dtype) for v in tensors]
        places = {id(value): number for number, value in enumerate(tensors)}
        before = len(self.inputs) + len(self.constants)
        params[before:before] = [own[number] for number in self.numbers]
        places.update(
            {id(value): number + len(self.numbers) for number, value in enumerate(tensors) if number >= before}
        )
        if self.has_arena:
            params.append(Tensor("arena", [renamed(self.arena)], "uint8"))

        def address(value: Value) -> Address:
            if id(value) in places:
                return Address(places[id(value)], 0, value.dtype)
            return Address(len(params) - 1, renamed(value.offset), value.dtype)

        calls = [
            Call(raw[step.kernel], [address(v) for v in step.operands], [renamed(s) for s in step.scalars])
            for step in self.steps
        ]
        return host_function(self.gv.name_hint, params, calls, self.vdevice.target)


class RunRecorder:
    """Records one run of a block.

    Parameters
    ----------
    finder : RunFinder
        Which found it.
    block : Block
    run : Run
    """

    def __init__(self, finder: RunFinder, block: Block, run: Run) -> None:
        self._finder, self._block, self._run = finder, block, run
        self._made: dict[relax.Var, list[Value]] = {}
        self._inputs: dict[relax.Var, Value] = {}
        self._constants: dict[tvm.ir.GenericConst, Value] = {}
        self._steps: list[Step] = []

    def record(self, function: str, gv: tvm.ir.GlobalVar) -> tuple[Recorded, list[relax.Binding]]:
        """The command buffer, to be called `gv`, and the bindings that take the run's place."""
        for index in self._run.members:
            self._take(self._block.bindings[index])
        results = [value for values in self._distinct() for value in values if value.is_result]
        transient = [value for values in self._distinct() for value in values if not value.is_result]
        arena = plan_arena([Lifetime(value.nbytes, value.begin, value.end) for value in transient])
        for value, offset in zip(transient, arena.offsets, strict=True):
            value.offset = offset
        inputs, constants = list(self._inputs.values()), list(self._constants.values())
        vdevice = self._run.vdevice
        recorded = Recorded(gv, function, vdevice, inputs, constants, results, [], arena.nbytes, self._steps)
        said = {e for v in (*inputs, *constants, *results) for e in v.shape if isinstance(e, tirx.Var)}
        recorded.numbers = [symbol for symbol in recorded.symbols() if symbol not in said]
        return recorded, self._bindings(recorded)

    def _distinct(self) -> list[list[Value]]:
        """The values of each call of a kernel; views name the same ones."""
        return list({id(values): values for values in self._made.values()}.values())

    def _take(self, binding: relax.Binding) -> None:
        call = binding.value
        if op_name(call) != "relax.call_tir":
            self._made[binding.var] = self._viewed(call)
        else:
            self._made[binding.var] = self._step(binding.var, call)
        if self._is_wanted(binding.var):
            for value in self._made[binding.var]:
                value.is_result = True

    def _viewed(self, view: relax.Expr) -> list[Value]:
        if isinstance(view, relax.TupleGetItem):
            return [self._made[view.tuple_value][view.index]]
        return self._made[view if isinstance(view, relax.Var) else view.args[0]]

    def _step(self, var: relax.Var, call: relax.Call) -> list[Value]:
        now = len(self._steps)
        kernel, args = call.args[0], list(call.args[1].fields)
        signature = self._finder.signature(kernel)
        types = list(tensor_types(call.ty_args[0]))
        made = [Value(ty, var.name if len(types) == 1 else f"{var.name}_{i}", now, now) for i, ty in enumerate(types)]
        read = [self._operand(arg, now) for arg in args if not isinstance(arg.ty, tvm.ir.PrimType)]
        params = self._finder.params(kernel)
        given = {param: arg for param, arg in zip(params, args) if isinstance(arg.ty, tvm.ir.PrimType)}  # noqa: B905
        shapes = [list(arg.ty.shape.values) for arg in args if not isinstance(arg.ty, tvm.ir.PrimType)]
        scalars = signature.matched([*shapes, *(value.shape for value in made)], given)
        self._steps.append(Step(kernel, (*read, *made), tuple(scalars), var.name))
        return made

    def _operand(self, arg: relax.Expr, now: int) -> Value:
        if isinstance(arg, tvm.ir.GenericConst):
            return self._constants.setdefault(arg, Value(arg.ty, f"constant_{len(self._constants)}"))
        if arg in self._made:
            (value,) = self._made[arg]
            value.end = now
            return value
        return self._inputs.setdefault(arg, Value(arg.ty, arg.name))

    def _is_wanted(self, var: relax.Var) -> bool:
        members = set(self._run.members)
        return not self._block.stays(var) or any(user not in members for user in self._block.users.get(var, []))

    def _bindings(self, recorded: Recorded) -> list[relax.Binding]:
        if not recorded.results:
            return []
        types = [value.ty for value in recorded.results]
        if recorded.has_arena:
            types.append(relax.TensorType([recorded.arena], "uint8", self._run.vdevice))
        args = [*self._inputs, *self._constants, *recorded.numbers]
        call = relax.call_tir(recorded.gv, relax.Tuple(args), types)
        local = relax.DataflowVar if self._block.is_dataflow else relax.Var
        buffer = local(recorded.gv.name_hint, tvm.ir.TupleType(types) if len(types) > 1 else types[0])
        bindings = [relax.VarBinding(buffer, typed(call, buffer.ty))]
        fields = {
            id(value): buffer if len(types) == 1 else relax.TupleGetItem(buffer, i)
            for i, value in enumerate(recorded.results)
        }
        for index in self._run.members:
            var = self._block.bindings[index].var
            if self._is_wanted(var):
                bindings += self._result(var, index, fields)
        return bindings

    def _result(self, var: relax.Var, index: int, fields: dict[int, relax.Expr]) -> list[relax.Binding]:
        """Bindings of a variable of the run that something after it reads."""
        values = self._made[var]
        if isinstance(var.ty, tvm.ir.TupleType):
            return [relax.VarBinding(var, typed(relax.Tuple([fields[id(v)] for v in values]), var.ty))]
        (value,) = values
        field_of, view = fields[id(value)], self._block.bindings[index].value
        if op_name(view) != "relax.reshape":
            return [relax.VarBinding(var, field_of)]
        local = relax.DataflowVar if self._block.is_dataflow else relax.Var
        whole = local(f"{var.name}_whole", value.ty)
        shaped = relax.Call(view.op, [whole, view.args[1]], view.attrs, view.ty_args, view.span, ret_ty=view.ty)
        return [relax.VarBinding(whole, field_of), relax.VarBinding(var, shaped)]
