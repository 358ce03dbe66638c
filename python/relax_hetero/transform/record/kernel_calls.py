"""Calls of kernels that a command buffer can make: what they read and write, and the numbers they are called with.

A command buffer calls a kernel without TVM's checks of its arguments. So a call qualifies only if its types say all
that these checks would ask: element types, ranks, and every extent, provably.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map

from ...tir.commands.table_kernel import is_one_launch
from ...tir.core.raw_kernel import RawSignature, has_temporaries, raw_signature
from ...tir.core.ties import Tie, in_place, ties_of
from ..ir.blocks import same_extent
from ..ir.extents import known_extents
from ..ir.kernels import call_vdevice
from ..ir.module_attrs import COMMANDS
from ..ir.op_names import CALL_TIR_INPLACE
from ..ir.rewriting import fresh_global_var, is_tensor_constant, op_name


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel.

    Attributes
    ----------
    kernel : tvm.ir.GlobalVar
    vdevice : relax.VDevice
        Where it runs.
    reads : tuple of relax.Expr
        Variables and constants, in the order of the kernel's parameters.
    makes : tuple of relax.TensorType
        The results.
    scalars : tuple of tvm.ir.PrimExpr
        One for each of the kernel's `RawSignature`.
    over : tuple of (int, int)
        Result (of `makes`) and operand (of `reads`) that share memory, of a kernel that works in place.
    """

    kernel: tvm.ir.GlobalVar
    vdevice: relax.VDevice
    reads: tuple[relax.Expr, ...]
    makes: tuple[relax.TensorType, ...]
    scalars: tuple[Any, ...]
    over: tuple[tuple[int, int], ...] = ()


class KernelCalls:
    """Finds the calls of a module's kernels that command buffers can make.

    Parameters
    ----------
    mod : tvm.IRModule
        Placed, of dispatches.
    separate_kernels : bool
        As `FormCommandBuffers` has it: whether kernels of llvm devices may have temporaries in a workspace.

    Attributes
    ----------
    used_names : set of str
        Names of functions.
    functions : dict of tvm.ir.GlobalVar to tirx.PrimFunc
        Kernels made for calls in place.
    """

    def __init__(self, mod: tvm.IRModule, separate_kernels: bool = False) -> None:
        self._mod, self._separate_kernels = mod, separate_kernels
        self._signatures: dict[tvm.ir.GlobalVar, RawSignature | None] = {}
        self._in_place: dict[tuple[tvm.ir.GlobalVar, Tie], tvm.ir.GlobalVar] = {}
        self.used_names = {gv.name_hint for gv in mod.get_global_vars()}
        self.functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}

    def ties(self, kernel: tvm.ir.GlobalVar) -> list[Tie]:
        """Ties of a kernel; none of one that takes numbers, whose parameters and tensors are counted differently."""
        func = self._mod.functions.get(kernel)
        is_plain = isinstance(func, tirx.PrimFunc) and all(map(is_buffer_var, func.params))
        return ties_of(func) if is_plain else []

    def in_place(self, kernel: tvm.ir.GlobalVar, tie: Tie) -> tvm.ir.GlobalVar:
        """The kernel that writes a tied result over its operand; one of `functions`, made on first request."""
        if (kernel, tie) not in self._in_place:
            func = in_place(self._mod.functions[kernel], tie)
            gv = fresh_global_var(f"{kernel.name_hint}_in_place", func.ty, self.used_names)
            self.functions[gv] = func
            self._in_place[kernel, tie] = gv
        return self._in_place[kernel, tie]

    @property
    def replaced(self) -> list[tvm.ir.GlobalVar]:
        """Kernels that calls in place have taken the place of, wholly or in part."""
        return list(dict.fromkeys(kernel for kernel, _ in self._in_place))

    def signature(self, kernel: tvm.ir.GlobalVar) -> RawSignature | None:
        """How a kernel is called raw; None for functions that cannot be."""
        if kernel not in self._signatures:
            func = self.functions.get(kernel, self._mod.functions.get(kernel))
            fits = isinstance(func, tirx.PrimFunc) and COMMANDS not in func.attrs and self._can_be_called(func)
            self._signatures[kernel] = raw_signature(func) if fits else None
        return self._signatures[kernel]

    def _can_be_called(self, kernel: tirx.PrimFunc) -> bool:
        """True if another function can call a kernel, as far as its device goes: those of GPUs must be one launch.

        Those of CPUs must have no temporaries in a workspace, which only this library's code for llvm allows.
        """
        target = kernel.attrs.get("target")
        if target is not None and "gpu" in target.keys:
            return is_one_launch(kernel)
        allowed = self._separate_kernels and target is not None and target.kind.name == "llvm"
        return allowed or not has_temporaries(kernel)

    def of(self, binding: relax.Binding) -> KernelCall | None:
        """The call that a binding makes; None for any other work, and for calls that must be checked as they run."""
        call = binding.value
        if not isinstance(binding, relax.VarBinding) or op_name(call) not in ("relax.call_tir", CALL_TIR_INPLACE):
            return None
        kernel, operands = call.args[0], call.args[1]
        signature = self.signature(kernel)
        made = _results(call.ty_args[0])
        if signature is None or made is None or not isinstance(operands, relax.Tuple):
            return None
        vdevice = made[0].vdevice or call_vdevice(call)
        if vdevice is None or vdevice.memory_scope != "global":
            return None
        args = [(arg, arg.ty) for arg in operands.fields]
        numbers = [arg for arg, ty in args if isinstance(ty, tvm.ir.PrimType)]
        reads = tuple(arg for arg, ty in args if isinstance(ty, relax.TensorType) and _is_tensor(arg))
        if len(numbers) + len(reads) != len(args) or len(numbers) != len(signature.numbers):
            return None
        places = list(map(int, call.attrs.inplace_indices)) if op_name(call) == CALL_TIR_INPLACE else [-1] * len(made)
        over = [(i, operands.fields[place]) for i, place in enumerate(places) if place >= 0]
        if not all(isinstance(arg, relax.Var) for _, arg in over):
            return None  # a constant
        types = [ty for _, ty in args if isinstance(ty, relax.TensorType)]
        types += [ty for ty, place in zip(made, places, strict=True) if place < 0]
        scalars = _matched(signature, types, dict(zip(signature.numbers, numbers, strict=True)))
        pairs = tuple((i, reads.index(arg)) for i, arg in over)
        return None if scalars is None else KernelCall(kernel, vdevice, reads, made, scalars, pairs)


def _results(ty: tvm.ir.Type) -> tuple[relax.TensorType, ...] | None:
    """The results of a kernel; None for tuples inside of tuples, and for none."""
    types = tuple(ty.fields) if isinstance(ty, tvm.ir.TupleType) else (ty,)
    return types if types and all(isinstance(field, relax.TensorType) for field in types) else None


def _is_tensor(arg: relax.Expr) -> bool:
    return isinstance(arg, relax.Var) or is_tensor_constant(arg)


def _matched(
    signature: RawSignature, types: Sequence[tvm.ir.Type], given: Mapping[tirx.Var, Any]
) -> tuple[Any, ...] | None:
    """The values of a kernel's scalars for tensors of these types; None where anything does not provably fit."""
    if len(types) != len(signature.buffers):
        return None
    values: dict[tirx.Var, Any] = dict(given)
    both: list[tuple[Any, Any]] = []
    for buffer, dtype, ty in zip(signature.extents, signature.dtypes, types, strict=True):
        extents = known_extents(ty)
        if extents is None or str(ty.dtype) != dtype or len(extents) != len(buffer):
            return None
        for expected, found in zip(buffer, extents, strict=True):
            if isinstance(expected, tirx.Var):
                both.append((values.setdefault(expected, found), found))
            else:
                both.append((expected, found))
    if not all(_is_same(expected, found, values) for expected, found in both):
        return None
    scalars = [_as(values[scalar], str(scalar.ty.dtype)) for scalar in signature.scalars]
    return None if any(scalar is None for scalar in scalars) else tuple(scalars)


def _is_same(expected: Any, found: Any, values: Mapping[tirx.Var, Any]) -> bool:
    """Return whether an extent that a kernel writes, over its own variables, is provably the one of its operand."""
    if expected is found:
        return True
    if isinstance(expected, int):
        return isinstance(found, int) and expected == found
    said = structural_map(
        expected, (tvm.ir.Var, lambda var: _as(values[var], str(var.ty.dtype)) if var in values else var)
    )
    return same_extent(said, _as(found, str(said.ty.dtype)))


def _as(value: Any, dtype: str) -> Any:
    """A number as one of an element type; None where it would not be the same number."""
    if isinstance(value, int):
        return tirx.const(value, dtype)
    own = str(value.ty.dtype)
    if own == dtype:
        return value
    is_integer = all(name.startswith(("int", "uint")) for name in (own, dtype))
    return value.astype(dtype) if is_integer else None
