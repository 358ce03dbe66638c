"""Plans of functions that cannot be cut into steps: hosts run their whole parts and exchange messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax

from ...artifact.signature import FunctionSignature
from ...transform.partition.partition_by_host import SIZES_FIRST
from ..call_plan import CALL, CallPlan, HostRun, Source


def plan_of_runs(
    signature: FunctionSignature, parts: Mapping[str, tuple[tvm.ir.GlobalVar, relax.Function]], inputs: int
) -> CallPlan:
    """The plan of a function by its part for each host.

    Parameters
    ----------
    inputs : int
        Number of inputs of the function, tuples opened.
    """
    runs: list[HostRun] = []
    sizes: list[tuple[str, ...]] = []
    for host, (gv, func) in parts.items():
        params, arguments = list(func.params), []
        if SIZES_FIRST in func.attrs:
            arguments.append(Source(CALL, inputs + len(sizes)))
            sizes.append(tuple(str(symbol.name) for symbol in params.pop(0).ty.values))
        numbers = iter(range(inputs))
        arguments += [_argument(param.ty, numbers) for param in params]
        runs.append(HostRun(host, gv.name_hint, tuple(arguments)))
    result = _result([func.ret_ty for _, func in parts.values()], iter(range(1 << 30)))
    return CallPlan((), result, signature=signature, sizes=tuple(sizes), runs=tuple(runs))


def _argument(ty: tvm.ir.Type, numbers: Iterator[int]) -> Any:
    if isinstance(ty, tvm.ir.TupleType):
        return tuple(_argument(field, numbers) for field in ty.fields)
    number = next(numbers)
    return None if _is_nothing(ty) else Source(CALL, number)


def _result(types: Sequence[tvm.ir.Type], numbers: Iterator[int]) -> Any:
    """The result, each leaf from the first run that has it."""
    if isinstance(types[0], tvm.ir.TupleType):
        return tuple(_result([ty.fields[index] for ty in types], numbers) for index in range(len(types[0].fields)))
    number = next(numbers)
    return next((Source(run, number) for run, ty in enumerate(types) if not _is_nothing(ty)), ())


def _is_nothing(ty: tvm.ir.Type) -> bool:
    """Return whether a type is what stands for values of other hosts."""
    return isinstance(ty, relax.ShapeType) and int(ty.ndim) == 0
