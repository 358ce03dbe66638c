"""Axes whose positions are taken apart by a constant become two axes, so that every access is linear again.

Before, what a reshape and a transpose leave behind::

    for c in 24: y[c] = x[c % 3 * 8 + c // 3]

After::

    for a in 8: for b in 3: y[a * 3 + b] = x[b * 8 + a]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm import tirx
from tvm.sym import Analyzer
from tvm_ffi import structural_map, structural_walk

from ..core.builder import Expr
from .nests import Nest
from .stages import Axis, replaced

_APART = (tirx.FloorDiv, tirx.FloorMod)


def split_axes(nest: Nest) -> Nest:
    """The nest with such axes split; axes that are taken apart in several ways stay, and those of reductions."""
    if nest.sums:
        return nest
    nest = _rewritten(nest, nest.axes, {})
    found: dict[tirx.Var, set[int]] = {}

    for value in nest.expressions():
        for node in _taken_apart(value):
            if isinstance(node.a, tvm.ir.Var) and isinstance(node.b, tirx.IntImm):
                found.setdefault(node.a, set()).add(int(node.b))
    axes: list[Axis] = []
    split: dict[tirx.Var, Expr] = {}
    for axis in nest.axes:
        by = next(iter(found.get(axis.var, ())), 1)
        fits = isinstance(axis.extent, int) and 1 < by < axis.extent and axis.extent % by == 0
        if not fits or len(found[axis.var]) != 1:
            axes.append(axis)
            continue
        outer, inner = tirx.Var(f"{axis.var.name}_o", "int64"), tirx.Var(f"{axis.var.name}_i", "int64")
        axes += [Axis(outer, axis.extent // by), Axis(inner, by)]
        split[axis.var] = outer * by + inner
    return replace(_rewritten(nest, axes, split), axes=tuple(axes), split=split) if split else nest


def _rewritten(nest: Nest, axes: Sequence[Axis], values: dict[tirx.Var, Expr]) -> Nest:
    """The nest with variables replaced, and quotients and remainders simplified."""
    if not any(_taken_apart(value) for value in nest.expressions()):
        return nest
    analyzer = Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, tvm.ir.Range(0, axis.extent))

    def rewritten(value: Expr) -> Expr:
        return structural_map(replaced(value, values), [(kind, analyzer.simplify) for kind in _APART])

    return replace(
        nest,
        steps=[(buffer, rewritten(value)) for buffer, value in nest.steps],
    )


def _taken_apart(value: Expr) -> list[Expr]:
    found: list[Expr] = []
    structural_walk(value, [(kind, found.append) for kind in _APART])
    return found
