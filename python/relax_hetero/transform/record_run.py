"""A run of kernels becomes a command buffer: what it reads and gives, where its transient values lie, its commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map, structural_walk

from ..tir.command_list import Address, Call, Tensor, host_function
from ..tir.raw_kernel import plain_extent
from .blocks import Block, same_shape
from .command_regions import Run, is_view
from .kernel_calls import KernelCall, known_extents
from .plan_arena import Lifetime, plan_arena
from .rewriting import typed


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
    shape : list of (int or tirx.Expr)
    """

    ty: relax.TensorType
    name: str
    begin: int = 0
    end: int = 0
    is_result: bool = False
    offset: Any = 0
    shape: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = [plain_extent(extent) for extent in self.ty.shape.values]

    @property
    def dtype(self) -> str:
        """TVM's name of its element type."""
        return str(self.ty.dtype.dtype)

    @property
    def nbytes(self) -> Any:
        """Its size: an int, or an expression."""
        dtype = tvm.DataType(self.dtype)
        count: Any = (dtype.bits * dtype.lanes + 7) // 8
        # Numbers first, as an expression cannot be told from zero.
        for extent in sorted(self.shape, key=lambda extent: not isinstance(extent, int)):
            count = count * extent
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
    ended : str
        What came after the run and could not join it.
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
    ended: str = ""

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
        params: list[Any] = [Tensor(v.name, [renamed(e) for e in v.ty.shape.values], v.dtype) for v in tensors]
        places = {id(value): number for number, value in enumerate(tensors)}
        before = len(self.inputs) + len(self.constants)
        params[before:before] = [own[number] for number in self.numbers]
        places.update(
            {id(value): number + len(self.numbers) for number, value in enumerate(tensors) if number >= before}
        )
        if self.has_arena:
            params.append(Tensor("arena", [_int64(renamed(self.arena))], "uint8"))

        def address(value: Value) -> Address:
            if id(value) in places:
                return Address(places[id(value)], 0, value.dtype)
            return Address(len(params) - 1, renamed(value.offset), value.dtype)

        calls = [
            Call(raw[step.kernel], [address(v) for v in step.operands], [renamed(s) for s in step.scalars])
            for step in self.steps
        ]
        return host_function(self.gv.name_hint, params, calls, self.vdevice.target)


def _int64(extent: Any) -> Any:
    return tirx.IntImm("int64", extent) if isinstance(extent, int) else extent


class RunRecorder:
    """Records one run of a block.

    Parameters
    ----------
    block : Block
    run : Run
        Of the block.
    stay : set of relax.Var
        The variables of the block that are bound outside of any run.
    """

    def __init__(self, block: Block, run: Run, stay: Set[relax.Var]) -> None:
        self._block, self._run, self._stay = block, run, stay
        self._members = set(run.members)
        self._made: dict[relax.Var, list[Value]] = {}
        self._values: list[Value] = []
        self._inputs: dict[relax.Var, Value] = {}
        self._constants: dict[tvm.ir.GenericConst, Value] = {}
        self._steps: list[Step] = []

    def record(self, function: str, gv: tvm.ir.GlobalVar) -> tuple[Recorded, list[relax.Binding]]:
        """The command buffer, to be called `gv`, and the bindings in the run's place: none if no one reads it."""
        for index in self._run.members:
            var = self._block.bindings[index].var
            call = self._run.calls.get(index)
            self._made[var] = self._viewed(self._block.definitions[var]) if call is None else self._step(var, call)
            if self._is_wanted(var):
                for value in self._made[var]:
                    value.is_result = True
        results = [value for value in self._values if value.is_result]
        transient = [value for value in self._values if not value.is_result]
        arena = plan_arena([Lifetime(value.nbytes, value.begin, value.end) for value in transient])
        for value, offset in zip(transient, arena.offsets, strict=True):
            value.offset = offset
        inputs, constants = list(self._inputs.values()), list(self._constants.values())
        vdevice = self._run.vdevice
        recorded = Recorded(gv, function, vdevice, inputs, constants, results, [], arena.nbytes, self._steps)
        said = {e for v in (*inputs, *constants, *results) for e in v.shape if isinstance(e, tirx.Var)}
        recorded.numbers = [symbol for symbol in recorded.symbols() if symbol not in said]
        return recorded, self._bindings(recorded)

    def _viewed(self, view: relax.Expr) -> list[Value]:
        if isinstance(view, relax.TupleGetItem):
            return [self._made[view.tuple_value][view.index]]
        return self._made[view if isinstance(view, relax.Var) else view.args[0]]

    def _step(self, var: relax.Var, call: KernelCall) -> list[Value]:
        now = len(self._steps)
        names = [var.name] if len(call.makes) == 1 else [f"{var.name}_{i}" for i in range(len(call.makes))]
        made = [Value(ty, name, now, now) for ty, name in zip(call.makes, names, strict=True)]
        self._values += made
        read = [self._operand(arg, now) for arg in call.reads]
        self._steps.append(Step(call.kernel, (*read, *made), call.scalars, var.name))
        return made

    def _operand(self, arg: relax.Expr, now: int) -> Value:
        if isinstance(arg, tvm.ir.GenericConst):
            return self._constants.setdefault(arg, Value(arg.ty, f"constant_{len(self._constants)}"))
        if arg in self._made:
            (value,) = self._made[arg]
            value.end = now
            return value
        shown = self._shown(arg)
        return self._inputs.setdefault(shown, Value(shown.ty, shown.name))

    def _shown(self, var: relax.Var) -> relax.Var:
        """The tensor that a view shows, if no run made it: kernels take it as it is, by its address."""
        while var in self._stay and is_view(self._block.bindings[self._block.positions[var]]):
            view = self._block.definitions[var]
            if isinstance(view, relax.TupleGetItem):
                break
            source = view if isinstance(view, relax.Var) else view.args[0]
            if known_extents(source.ty) is None:
                break
            var = source
        return var

    def _is_wanted(self, var: relax.Var) -> bool:
        users = self._block.users.get(var, [])
        return not self._block.stays(var) or any(user not in self._members for user in users)

    def _bindings(self, recorded: Recorded) -> list[relax.Binding]:
        if not recorded.results:
            return []
        types = [value.ty for value in recorded.results]
        if recorded.has_arena:
            types.append(relax.TensorType([recorded.arena], "uint8", self._run.vdevice))
        args = [*self._inputs, *self._constants, *recorded.numbers]
        call = relax.call_tir(recorded.gv, relax.Tuple(args), types)
        buffer = self._local(recorded.gv.name_hint, tvm.ir.TupleType(types) if len(types) > 1 else types[0])
        bindings = [relax.VarBinding(buffer, typed(call, buffer.ty))]
        fields = {
            id(value): buffer if len(types) == 1 else relax.TupleGetItem(buffer, i)
            for i, value in enumerate(recorded.results)
        }
        for index in self._run.members:
            var = self._block.bindings[index].var
            if self._is_wanted(var):
                bindings += self._result(var, fields)
        return bindings

    def _result(self, var: relax.Var, fields: Mapping[int, relax.Expr]) -> list[relax.Binding]:
        """Bindings of a variable of the run that something after it reads."""
        values = self._made[var]
        if isinstance(var.ty, tvm.ir.TupleType):
            parts = [self._local(value.name, value.ty) for value in values]
            bindings = [relax.VarBinding(part, fields[id(v)]) for part, v in zip(parts, values, strict=True)]
            return [*bindings, relax.VarBinding(var, relax.Tuple(parts))]
        (value,) = values
        if known_extents(var.ty) is None or same_shape(var.ty.shape.values, value.ty.shape.values):
            return [relax.VarBinding(var, fields[id(value)])]
        whole = self._local(f"{var.name}_whole", value.ty)
        shaped = typed(relax.op.reshape(whole, var.ty.shape), var.ty)
        return [relax.VarBinding(whole, fields[id(value)]), relax.VarBinding(var, shaped)]

    def _local(self, name: str, ty: tvm.ir.Type) -> relax.Var:
        return (relax.DataflowVar if self._block.is_dataflow else relax.Var)(name, ty)
