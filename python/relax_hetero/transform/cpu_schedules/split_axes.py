"""Axes whose positions are taken apart by a constant become two axes, so that every access is linear again.

Before, what a reshape and a transpose leave behind::

    for c in 24: y[c] = x[c % 3 * 8 + c // 3]

After::

    for a in 8: for b in 3: y[a * 3 + b] = x[b * 8 + a]
"""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm import tirx
from tvm.sym import Analyzer
from tvm_ffi import structural_map, structural_walk

from ...tir.builder import Expr
from .nests import Nest
from .stages import Axis, replaced


def split_axes(nest: Nest) -> Nest:
    """The nest with such axes split; axes that are taken apart in several ways stay."""
    found: dict[tirx.Var, set[int]] = {}

    def note(node: tirx.FloorDiv | tirx.FloorMod) -> None:
        if isinstance(node.a, tvm.ir.Var) and isinstance(node.b, tirx.IntImm):
            found.setdefault(node.a, set()).add(int(node.b))

    for value in nest.expressions():
        structural_walk(value, [(tirx.FloorDiv, note), (tirx.FloorMod, note)])
    axes: list[Axis] = []
    split: dict[tirx.Var, Expr] = {}
    analyzer = Analyzer()
    for axis in nest.axes:
        by = next(iter(found.get(axis.var, ())), 1)
        fits = isinstance(axis.extent, int) and 1 < by < axis.extent and axis.extent % by == 0
        if not fits or len(found[axis.var]) != 1:
            axes.append(axis)
            continue
        outer, inner = tirx.Var(f"{axis.var.name}_o", "int64"), tirx.Var(f"{axis.var.name}_i", "int64")
        axes += [Axis(outer, axis.extent // by), Axis(inner, by)]
        split[axis.var] = outer * by + inner
    if not split:
        return nest
    for axis in axes:
        analyzer.bind(axis.var, tvm.ir.Range(0, axis.extent))

    def simpler(node: Expr) -> Expr:
        return analyzer.simplify(node)

    def rewritten(value: Expr) -> Expr:
        return structural_map(replaced(value, split), [(tirx.FloorDiv, simpler), (tirx.FloorMod, simpler)])

    return replace(
        nest,
        axes=tuple(axes),
        sums=[replace(s, initial=rewritten(s.initial), value=rewritten(s.value)) for s in nest.sums],
        steps=[(buffer, rewritten(value)) for buffer, value in nest.steps],
        split=split,
    )
