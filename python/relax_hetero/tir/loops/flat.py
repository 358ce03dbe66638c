"""Boxes with collapsed loops: accesses by offset, and neighbouring loops fused where every offset allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.sym import Analyzer, detect_linear_equation

from ..core.builder import Expr, int64
from ..core.walks import replaced
from ..core.work_split import ravel
from .boxes import Box, analyzer_of
from .nests import Nest
from .stages import Load, loads, variables, with_loads


@dataclass(frozen=True)
class Loop:
    """A loop; static bounds are ints, and its count is a multiple of `multiple`."""

    var: tirx.Var
    begin: Expr
    end: Expr
    multiple: int = 1

    @property
    def count(self) -> Expr:
        """Number of iterations."""
        return self.end if isinstance(self.begin, int) and self.begin == 0 else self.end - self.begin


@dataclass(frozen=True)
class FlatBox:
    """A box as loops over buffers of one dimension."""

    nest: Nest  # expressions over the variables of the loops
    # Loops, outermost first. Results are contiguous along the last spatial one.
    spatial: tuple[Loop, ...]
    reduced: tuple[Loop, ...]
    places: dict[tirx.Buffer, Expr]  # offset at which each stored buffer is written

    def at(self, values: Mapping[tirx.Var, Expr]) -> FlatBox:
        """The box with variables replaced."""
        if not values:
            return self
        nest = replace(
            self.nest,
            sums=[
                replace(s, initial=replaced(s.initial, values), value=replaced(s.value, values)) for s in self.nest.sums
            ],
            steps=[(buffer, replaced(value, values)) for buffer, value in self.nest.steps],
        )
        return replace(self, nest=nest, places={b: replaced(place, values) for b, place in self.places.items()})

    def strides(self, expr: Expr, var: tirx.Var) -> list[Expr | None]:
        """Stride in a variable of each read in `expr` of another nest's buffer; None where it varies."""
        computed = self.nest.computed
        return [stride(load.indices[0], var) for load in loads(expr) if load.source not in computed]


def stride(offset: Expr, var: tirx.Var) -> Expr | None:
    """Stride of an offset in a variable, an int if static; None where it varies."""
    terms = detect_linear_equation(offset, [var])
    if not terms or var in variables(terms[1]):
        return None
    return int(terms[0]) if isinstance(terms[0], tirx.IntImm) else terms[0]


def is_step(step: Expr | None, number: int) -> bool:
    """Return whether a stride is statically `number`."""
    return isinstance(step, int) and step == number


def flatten(box: Box, shared: tuple[int, Expr, Expr] | None, view: Callable[[tirx.Buffer], tirx.Buffer]) -> FlatBox:
    """The flat form of a box.

    `shared`: axis of which only a part is computed; it stays a separate loop. `view`: function from a buffer to its
    view of one dimension.
    """
    nest = box.nest
    analyzer = analyzer_of(nest, box.bounds)

    def flat_load(load: Load) -> Expr:
        return tirx.BufferLoad(view(load.source), [_offset(load.source, load.indices, analyzer)])

    flat_nest = replace(
        nest,
        sums=[replace(s, buffer=view(s.buffer), value=with_loads(s.value, flat_load)) for s in nest.sums],
        steps=[(view(buffer), with_loads(value, flat_load)) for buffer, value in nest.steps],
        stored=[view(buffer) for buffer in nest.stored],
    )
    position = nest.position()
    places = {view(buffer): _offset(buffer, position, analyzer) for buffer in nest.stored}
    computed = flat_nest.computed
    offsets = [*places.values()]
    uncollapsible: set[tirx.Var] = set()
    for value in flat_nest.expressions():
        offsets += [load.indices[0] for load in loads(value) if load.source not in computed]
        uncollapsible |= variables(with_loads(value, lambda load: tirx.const(0, load.ty.dtype)))
    spatial, reduced = [], [Loop(axis.var, 0, axis.extent) for axis in nest.reduced]
    for d, (axis, (begin, end)) in enumerate(zip(nest.axes, box.bounds, strict=True)):
        if shared is not None and d == shared[0]:
            spatial.append(Loop(axis.var, shared[1], shared[2]))
            uncollapsible.add(axis.var)
        else:
            spatial.append(Loop(axis.var, begin, end))
    values: dict[tirx.Var, Expr] = {}
    terms = [_terms(offset, [loop.var for loop in (*spatial, *reduced)]) for offset in offsets]
    for _, nonlinear in terms:
        uncollapsible |= nonlinear
    collapsed_spatial = _collapse(spatial, [numbers for numbers, _ in terms], uncollapsible, values)
    collapsed_reduced = _collapse(reduced, [numbers for numbers, _ in terms], uncollapsible, values)
    return FlatBox(flat_nest, tuple(collapsed_spatial), tuple(collapsed_reduced), places).at(values)


def _offset(buffer: tirx.Buffer, indices: Sequence[Expr], analyzer: Analyzer) -> Expr:
    return analyzer.simplify(int64(ravel([index.astype("int64") for index in indices], buffer.shape)))


def _terms(offset: Expr, variables_: list[tirx.Var]) -> tuple[dict[tirx.Var, Expr], set[tirx.Var]]:
    """Strides of an offset in each variable, and the variables in which it is not linear."""
    terms = detect_linear_equation(offset, variables_)
    linear = variables_
    if not terms:
        linear = [var for var in variables_ if stride(offset, var) is not None]
        terms = detect_linear_equation(offset, linear)
        if not terms:
            return {}, set(variables_)
    numbers = {var: int(t) if isinstance(t, tirx.IntImm) else t for var, t in zip(linear, terms[:-1], strict=True)}
    return numbers, variables(terms[-1]) & set(variables_)


def _collapse(
    loops: list[Loop], terms: list[dict[tirx.Var, Expr]], uncollapsible: set[tirx.Var], values: dict[tirx.Var, Expr]
) -> list[Loop]:
    """The loops with neighbours collapsed where possible; `values` gets expressions of their variables."""
    collapsed: list[Loop] = []
    inner: tirx.Var | None = None  # the variable of the innermost loop that was collapsed into the last one
    for loop in reversed(loops):
        count = loop.count
        if isinstance(count, int) and count == 1:
            values[loop.var] = loop.begin if isinstance(loop.begin, tirx.Expr) else tirx.IntImm("int64", loop.begin)
            continue
        last = collapsed[-1] if collapsed else None
        if last is not None and inner is not None and loop.var not in uncollapsible and inner not in uncollapsible:
            if all(_is_contiguous(numbers, loop.var, inner, last.count) for numbers in terms):
                values[loop.var] = tirx.IntImm("int64", 0) + loop.begin
                collapsed[-1] = Loop(last.var, 0, last.count * count)
                continue
        if loop.var in uncollapsible and not isinstance(loop.begin, int):
            collapsed.append(loop)  # the part of a shared axis
            inner = None
            continue
        var = tirx.Var(loop.var.name, "int64")
        values[loop.var] = var + loop.begin if not is_step(loop.begin, 0) else var
        collapsed.append(Loop(var, 0, count))
        inner = loop.var
    return collapsed[::-1]


def _is_contiguous(numbers: dict[tirx.Var, Expr], outer: tirx.Var, inner: tirx.Var, count: Expr) -> bool:
    wide, narrow = numbers.get(outer, 0), numbers.get(inner, 0)
    if isinstance(wide, int) and isinstance(narrow, int) and isinstance(count, int):
        return wide == narrow * count
    if is_step(wide, 0) or is_step(narrow, 0):
        return is_step(wide, 0) and is_step(narrow, 0)
    return Analyzer().can_prove_equal(wide, narrow * count)
