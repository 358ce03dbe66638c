"""How much memory an allocation takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_walk

from ...tir.core.builder import plain_extent
from ..ir.kernels import bytes_of_extents

ALLOC = "relax.builtin.alloc_tensor"
"""The op that allocates a tensor, before memory is planned."""

UPPER_BOUND = "tir_var_upper_bound"
"""On a Relax function, as stock TVM reads it: the most that symbolic dimensions of these names will be."""


def upper_bounds(func: relax.Function) -> dict[str, int]:
    """The most that symbolic dimensions of a function will be, of those that say so."""
    return {str(name): int(bound) for name, bound in (func.attrs.get(UPPER_BOUND) or {}).items()}


def size_of(alloc: relax.Call, bounds: Mapping[str, int]) -> Any:
    """The bytes that an allocation takes: the most, where its symbols have upper bounds; else symbolic."""
    nbytes = bytes_of_extents(map(plain_extent, alloc.args[0].values), tvm.DataType(str(alloc.args[1].value)))
    if isinstance(nbytes, int) or not bounds:
        return nbytes
    analyzer = tvm.sym.Analyzer()
    symbols: dict[tirx.Var, None] = {}
    structural_walk(nbytes, (tvm.ir.Var, lambda var: symbols.setdefault(var)))
    if any(str(symbol.name) not in bounds for symbol in symbols):
        return nbytes
    for symbol in symbols:
        analyzer.bind(symbol, tvm.ir.Range(0, bounds[str(symbol.name)] + 1))
    return int(analyzer.const_int_bound(nbytes).max_value)
