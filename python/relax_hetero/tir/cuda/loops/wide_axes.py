"""Widening of 32-bit axes, as users write them in ``T.grid(64, 32)``, to the 64-bit axes of all other stages.

Offsets are then linear in the axes, without casts in between, so that contiguous accesses are recognized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm import tirx

from ...core.builder import Expr
from ...core.walks import replaced
from ...loops.stages import Axis, Load, Stage, with_loads

_WIDE = "int64"
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)


def with_wide_axes(stages: Sequence[Stage]) -> list[Stage]:
    """Widen the axes of stages to 64 bits."""
    return [_wide_stage(stage) for stage in stages]


def _wide_stage(stage: Stage) -> Stage:
    narrow = [axis for axis in (*stage.spatial, *stage.reduced) if str(axis.var.ty.dtype) != _WIDE]
    if not narrow:
        return stage
    wide = {axis.var: tirx.Var(axis.var.name, _WIDE) for axis in narrow}
    casts = {var: tirx.Cast(str(var.ty.dtype), new) for var, new in wide.items()}

    def widen(load: Load) -> Expr:
        return tirx.BufferLoad(load.source, [_wide(index, wide) for index in load.indices])

    def axes(narrow_axes: Sequence[Axis]) -> tuple[Axis, ...]:
        return tuple(Axis(wide.get(axis.var, axis.var), _extent(axis.extent)) for axis in narrow_axes)

    def widen_value(expr: Expr) -> Expr:
        return replaced(with_loads(expr, widen), casts)

    return replace(
        stage,
        values=tuple(map(widen_value, stage.values)),
        initial=tuple(map(widen_value, stage.initial)),
        spatial=axes(stage.spatial),
        reduced=axes(stage.reduced),
    )


def _extent(extent: Expr) -> Expr:
    return extent if isinstance(extent, int) or str(extent.ty.dtype) == _WIDE else _wide(extent, {})


def _wide(expr: Expr, wide: dict[tirx.Var, tirx.Var]) -> Expr:
    """Widen an index expression to 64 bits."""
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm(_WIDE, int(expr))
    if isinstance(expr, tvm.ir.Var) and expr in wide:
        return wide[expr]
    if isinstance(expr, _ARITHMETIC):
        return type(expr)(_wide(expr.a, wide), _wide(expr.b, wide))
    if isinstance(expr, tirx.Cast) and str(expr.ty.dtype) == _WIDE and expr.value in wide:
        return wide[expr.value]
    return expr if str(expr.ty.dtype) == _WIDE else tirx.Cast(_WIDE, expr)
