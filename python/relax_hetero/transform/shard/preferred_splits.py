"""`PreferredSplits`: splits of a function's values that serve their readers, from the last binding to the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import relax

from ...op.cached_attention import CACHED_ATTENTION
from ...op.sharding import SHARD, split_axes
from ...op.traits import ELEMENTWISE
from ..ir.blocks import shape_of
from ..ir.rewriting import op_name
from .sharding import known
from .sharding_rules import PRODUCTS, consecutive, last_axis_slice, passes_on, segments_of_operand


class PreferredSplits:
    """Splits of each value that its readers ask for, or are faster with.

    `outputs`: results of the function, and the splits that the caller asks for, as in `asked`.
    """

    def __init__(self, bindings: Sequence[relax.Binding], outputs: Mapping[relax.Var, set[tuple[int, int]]]) -> None:
        # Segments along the last axis of which each device should have its share.
        self.segments: dict[relax.Var, tuple[int, ...]] = {}
        # Values whose split serves a product, attention, or the caller.
        self.read_by_products: set[relax.Var] = set(outputs)
        # Splits that annotations ask for, the caller, and attention, whose rule has no other form: the axis of the
        # mesh, and that of the value.
        self.asked: dict[relax.Var, set[tuple[int, int]]] = {var: set(splits) for var, splits in outputs.items()}
        self._slices: dict[relax.Var, dict[int, int]] = {}  # of the last axis: begin to end
        for binding in reversed(bindings):
            if isinstance(binding.value, relax.Call):
                self._add_call(binding.var, binding.value)
            elif isinstance(binding.value, (relax.Var, relax.TupleGetItem)):
                value = binding.value
                source = value if isinstance(value, relax.Var) else value.tuple_value
                if binding.var in self.read_by_products:
                    self.read_by_products.update(leaves(source))

    def _add_call(self, var: relax.Var, call: relax.Call) -> None:
        operands = [leaf for arg in call.args for leaf in leaves(arg)]
        if op_name(call) in PRODUCTS or (passes_on(call) and var in self.read_by_products):
            self.read_by_products.update(operands)
        for operand, splits in self._asked_by(var, call, operands):
            self.asked.setdefault(operand, set()).update(splits)
            self.read_by_products.add(operand)
        self._add_slice(call)
        for index, operand in enumerate(operands):
            shape = shape_of(operand)
            if shape and (index == 0 or op_name(call) in ELEMENTWISE):
                wanted = segments_of_operand(call, shape, self.segments.get(var, ()))
                if wanted:
                    self.segments[operand] = wanted

    def _asked_by(
        self, var: relax.Var, call: relax.Call, operands: list[relax.Var]
    ) -> list[tuple[relax.Var, set[tuple[int, int]]]]:
        """Operands of which a call asks for splits, and these."""
        if op_name(call) == SHARD:
            axes = enumerate(split_axes(str(call.attrs.placement)))
            splits = {(number, axis) for number, axis in axes if axis is not None}
        elif op_name(call) == CACHED_ATTENTION:
            return [(operands[0], {(0, len(shape_of(operands[0]) or ()) - 1)})]
        else:
            splits = self.asked.get(var, set()) if op_name(call) in ELEMENTWISE or self._joins(var, call) else set()
        rank = len(shape_of(var) or ())
        return [(operand, splits) for operand in operands if splits and len(shape_of(operand) or ()) == rank]

    def _joins(self, var: relax.Var, call: relax.Call) -> bool:
        """Return whether a call joins the segments that its reader would like, such as queries, keys and values."""
        if op_name(call) != "relax.concat" or not isinstance(call.args[0], relax.Tuple):
            return False
        shapes = [shape_of(field) or [None] for field in call.args[0].fields]
        is_last = int(call.attrs.axis or 0) in (-1, len(shapes[0]) - 1)
        return is_last and tuple(known(shape[-1]) for shape in shapes) == self.segments.get(var)

    def _add_slice(self, call: relax.Call) -> None:
        """Take slices that make up an axis as its segments, such as queries, keys and values of one product."""
        piece = last_axis_slice(call)
        if piece is None or not isinstance(call.args[0], relax.Var):
            return
        source = call.args[0]
        pieces = self._slices.setdefault(source, {})
        pieces[piece[0]] = piece[1]
        if segments := consecutive(pieces, known((shape_of(source) or [None])[-1])):
            self.segments[source] = segments


def leaves(expr: relax.Expr) -> list[relax.Var]:
    """Variables in an expression of tuples."""
    if isinstance(expr, relax.Tuple):
        return [var for field in expr.fields for var in leaves(field)]
    return [expr] if isinstance(expr, relax.Var) else []
