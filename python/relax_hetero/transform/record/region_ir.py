"""Command buffers of a model while they are made: values, steps, and the host function that they become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map, structural_walk

from ...tir.commands.command_list import Address, Call, Tensor, host_function
from ...tir.core.builder import plain_extent
from ..ir.kernels import bytes_of_extents


@dataclass(eq=False)
class RegionValue:
    """A tensor that a run reads or makes.

    Attributes
    ----------
    ty : relax.TensorType
    name : str
    begin, end : int
        The command that makes it and the last one that reads it.
    is_result : bool
        Whether something after the run reads it.
    over : RegionValue, optional
        The one whose memory it takes.
    offset : int or tirx.Expr
        Offset of its first byte in the arena, if it lies there and has memory of its own.
    shape : list of (int or tirx.Expr)
    """

    ty: relax.TensorType
    name: str
    begin: int = 0
    end: int = 0
    is_result: bool = False
    over: RegionValue | None = None
    offset: Any = 0
    shape: list[Any] = field(init=False)
    _nearer: RegionValue | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shape = [plain_extent(extent) for extent in self.ty.shape.values]

    @property
    def home(self) -> RegionValue:
        """The value that lay first in the same memory.

        Kernels that work in place make chains as long as the model, so each value that is passed on the way keeps a
        short cut to where the way ends.
        """
        passed: list[RegionValue] = []
        value = self
        while value.over is not None:
            passed.append(value)
            value = value._nearer or value.over
        for one in passed:
            one._nearer = value
        return value

    @staticmethod
    def forget_homes(values: Iterable[RegionValue]) -> None:
        """Drop the short cuts of values, some of which have memory of their own again."""
        for value in values:
            value._nearer = None

    @property
    def dtype(self) -> str:
        """TVM's name of its element type."""
        return str(self.ty.dtype.dtype)

    @property
    def nbytes(self) -> Any:
        """Its size: an int, or an expression."""
        return bytes_of_extents(self.shape, tvm.DataType(self.dtype))


@dataclass(frozen=True)
class RegionStep:
    """A call of a kernel in a run.

    Attributes
    ----------
    kernel : tvm.ir.GlobalVar
    operands : tuple of RegionValue
        Its tensors.
    access : tuple of str
        Access to each: ``"read"``, ``"write"`` or ``"read-write"``.
    scalars : tuple
        Those of its `RawSignature`.
    variable : str
    """

    kernel: tvm.ir.GlobalVar
    operands: tuple[RegionValue, ...]
    access: tuple[str, ...]
    scalars: tuple[Any, ...]
    variable: str


@dataclass
class OutlinedRegion:
    """A command buffer, to be written once the kernels' raw names are known.

    Attributes
    ----------
    gv : tvm.ir.GlobalVar
        The host function's.
    function : str
        The Relax function it was cut from.
    vdevice : relax.VDevice
    inputs, constants, results : list of RegionValue
        Its tensor parameters, in this order, with `numbers` before the results, and the arena after them. Results that
        take the memory of an input are not among them.
    numbers : list of tirx.Var
        The symbols that the call passes, since no tensor's extents say them.
    arena : int or tirx.Expr
        Bytes; 0 for none.
    steps : list of RegionStep
    ended : str
        Description of the binding that came after the run and could not join it.
    """

    gv: tvm.ir.GlobalVar
    function: str
    vdevice: relax.VDevice
    inputs: list[RegionValue]
    constants: list[RegionValue]
    results: list[RegionValue]
    numbers: list[tirx.Var]
    arena: Any
    steps: list[RegionStep]
    ended: str = ""

    @property
    def kernels(self) -> list[tvm.ir.GlobalVar]:
        """The kernels, in order of first use."""
        return list(dict.fromkeys(step.kernel for step in self.steps))

    @property
    def has_arena(self) -> bool:
        """True if any value is transient."""
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
            yield from (value.home.offset for value in step.operands)
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
        before = len(self.inputs) + len(self.constants)
        params[before:before] = [own[number] for number in self.numbers]
        places = {
            value.home: number + (len(self.numbers) if number >= before else 0) for number, value in enumerate(tensors)
        }
        if self.has_arena:
            params.append(Tensor("arena", [_int64(renamed(self.arena))], "uint8"))

        def address(value: RegionValue) -> Address:
            if value.home in places:
                return Address(places[value.home], 0, value.dtype)
            return Address(len(params) - 1, renamed(value.home.offset), value.dtype)

        calls = [
            Call(raw[step.kernel], [address(v) for v in step.operands], [renamed(s) for s in step.scalars])
            for step in self.steps
        ]
        return host_function(self.gv.name_hint, params, calls, self.vdevice.target)


def _int64(extent: Any) -> Any:
    return tirx.IntImm("int64", extent) if isinstance(extent, int) else extent
