"""Stages whose axes are 32-bit, as users write ``T.grid(64, 32)``, with 64-bit ones, as all other stages have.

Offsets are then linear in the axes, without a cast between, which is what finds vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm import tirx

from ...core.builder import Expr
from ...loops.stages import Axis, Load, Stage, replaced, with_loads

_WIDE = "int64"
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)


def with_wide_axes(stages: Sequence[Stage]) -> list[Stage]:
    """The stages with 64-bit axes."""
    return [_wide_stage(stage) for stage in stages]


def _wide_stage(stage: Stage) -> Stage:
    narrow = [axis for axis in (*stage.spatial, *stage.reduced) if str(axis.var.ty.dtype) != _WIDE]
    if not narrow:
        return stage
    wide = {axis.var: tirx.Var(axis.var.name, _WIDE) for axis in narrow}
    casts = {var: tirx.Cast(str(var.ty.dtype), new) for var, new in wide.items()}

    def change(load: Load) -> Expr:
        return tirx.BufferLoad(load.source, [_wide(index, wide) for index in load.indices])

    def axes(given: Sequence[Axis]) -> tuple[Axis, ...]:
        return tuple(Axis(wide.get(axis.var, axis.var), _extent(axis.extent)) for axis in given)

    def value(expr: Expr) -> Expr:
        return replaced(with_loads(expr, change), casts)

    return replace(
        stage,
        values=tuple(map(value, stage.values)),
        initial=tuple(map(value, stage.initial)),
        spatial=axes(stage.spatial),
        reduced=axes(stage.reduced),
    )


def _extent(extent: Expr) -> Expr:
    return extent if isinstance(extent, int) or str(extent.ty.dtype) == _WIDE else _wide(extent, {})


def _wide(expr: Expr, wide: dict[tirx.Var, tirx.Var]) -> Expr:
    """An index as a 64-bit number over 64-bit axes."""
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm(_WIDE, int(expr))
    if isinstance(expr, tvm.ir.Var) and expr in wide:
        return wide[expr]
    if isinstance(expr, _ARITHMETIC):
        return type(expr)(_wide(expr.a, wide), _wide(expr.b, wide))
    if isinstance(expr, tirx.Cast) and str(expr.ty.dtype) == _WIDE and expr.value in wide:
        return wide[expr.value]
    return expr if str(expr.ty.dtype) == _WIDE else tirx.Cast(_WIDE, expr)
