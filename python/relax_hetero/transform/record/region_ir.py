"""Command buffers of a model under construction: values, steps, and their host function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from ...target.vdevice import identifier
from ...tir.commands.command_list import Address, Call, Tensor, host_function
from ...tir.core.builder import int64, plain_extent
from ...tir.core.walks import replaced
from ..ir.kernels import bytes_of_extents
from ..ir.requirements import symbols_in


@dataclass(eq=False)
class RegionValue:
    """A tensor that a run reads or makes."""

    ty: relax.TensorType
    name: str
    # The command that defines it and the last one that reads it.
    begin: int = 0
    end: int = 0
    is_result: bool = False  # True if bindings after the run read it
    stored_over: RegionValue | None = None  # the value whose memory it takes
    offset: Any = 0  # offset of its first byte in the arena, if it is there and has memory of its own
    shape: list[Any] = field(init=False)
    _known_root: RegionValue | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shape = [plain_extent(extent) for extent in self.ty.shape.values]

    @property
    def root(self) -> RegionValue:
        """The first value in the same memory.

        In-place kernels make chains as long as the model, so the paths to roots are compressed, as in union-find.
        """
        path: list[RegionValue] = []
        value = self
        while value.stored_over is not None:
            path.append(value)
            value = value._known_root or value.stored_over
        for step in path:
            step._known_root = value
        return value

    @staticmethod
    def forget_roots(values: Iterable[RegionValue]) -> None:
        """Drop the compressed paths of values, some of which have memory of their own again."""
        for value in values:
            value._known_root = None

    @property
    def dtype(self) -> str:
        """TVM's name of the element type."""
        return str(self.ty.dtype.dtype)

    @property
    def nbytes(self) -> Any:
        """Size in bytes: an int, or an expression."""
        return bytes_of_extents(self.shape, tvm.DataType(self.dtype))


@dataclass(frozen=True)
class RegionStep:
    """A call of a kernel in a run."""

    kernel: tvm.ir.GlobalVar
    operands: tuple[RegionValue, ...]  # tensor arguments
    access: tuple[str, ...]  # access to each operand: ``"read"``, ``"write"`` or ``"read-write"``
    scalars: tuple[Any, ...]  # values of the scalars of the kernel's `RawSignature`
    variable: str


@dataclass
class OutlinedRegion:
    """A command buffer, whose host function is generated once the kernels' raw names are known."""

    gv: tvm.ir.GlobalVar  # global variable of the host function
    function: str  # the Relax function that contains the run
    vdevice: relax.VDevice
    # Tensor parameters, in this order, with `numbers` before the results, and the arena after them. Results that take
    # the memory of an input are not among them.
    inputs: list[RegionValue]
    constants: list[RegionValue]
    results: list[RegionValue]
    # The symbols that the call passes as numbers, since they are not extents of a tensor. Those that are given first
    # are parameters, even if nothing depends on them.
    numbers: list[tirx.Var]
    arena: Any  # bytes of the arena; 0 for none
    steps: list[RegionStep]
    ended_by: str = ""  # description of the binding that ended the run

    @property
    def kernels(self) -> list[tvm.ir.GlobalVar]:
        """The kernels, in order of first use."""
        return list(dict.fromkeys(step.kernel for step in self.steps))

    @property
    def has_arena(self) -> bool:
        """True if the arena has a size."""
        return not (isinstance(self.arena, int) and self.arena == 0)

    def symbols(self) -> list[tirx.Var]:
        """The symbols that its extents, scalars and offsets depend on, and `numbers`."""
        expressions = [expr for expr in self._expressions() if isinstance(expr, tirx.Expr)]
        return list(dict.fromkeys(symbol for expr in expressions for symbol in symbols_in(expr)))

    def _expressions(self) -> Iterator[Any]:
        for value in (*self.inputs, *self.constants, *self.results):
            yield from value.shape
        for step in self.steps:
            yield from step.scalars
            yield from (value.root.offset for value in step.operands)
        yield self.arena
        yield from self.numbers

    def host_function(self, raw: Mapping[tvm.ir.GlobalVar, tvm.ir.GlobalVar]) -> tirx.PrimFunc:
        """The PrimFunc that runs the steps; it calls kernels by their raw names."""
        own = {symbol: tirx.Var(_c_name(symbol.name), symbol.ty) for symbol in self.symbols()}

        def renamed(expr: Any) -> Any:
            return replaced(expr, own) if isinstance(expr, tirx.Expr) else expr

        tensors = [*self.inputs, *self.constants, *self.results]
        params: list[Any] = [Tensor(_c_name(v.name), [renamed(e) for e in v.ty.shape.values], v.dtype) for v in tensors]
        first_result = len(self.inputs) + len(self.constants)
        params[first_result:first_result] = [own[number] for number in self.numbers]
        indices = {
            value.root: number + (len(self.numbers) if number >= first_result else 0)
            for number, value in enumerate(tensors)
        }
        if self.has_arena:
            params.append(Tensor("arena", [int64(renamed(self.arena))], "uint8"))

        def address(value: RegionValue) -> Address:
            if value.root in indices:
                return Address(indices[value.root], 0, value.dtype)
            return Address(len(params) - 1, renamed(value.root.offset), value.dtype)

        calls = [
            Call(raw[step.kernel], [address(v) for v in step.operands], [renamed(s) for s in step.scalars])
            for step in self.steps
        ]
        return host_function(self.gv.name_hint, params, calls, self.vdevice.target)


def _c_name(name: str) -> str:
    """A name of C: TVM's generator writes those of variables as they are, such as ``/layer.0/MatMul@1`` of models."""
    return identifier(f"_{name}" if name[:1].isdigit() else name)
