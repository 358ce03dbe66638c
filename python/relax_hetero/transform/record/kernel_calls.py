"""Kernel calls that a command buffer can make: their operands, results and scalars.

A command buffer calls a kernel without TVM's checks of its arguments. So a call qualifies only if its types prove all
conditions of these checks: element types, ranks, and every extent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map

from ...target.vdevice import same_vdevice
from ...tir.commands.table_kernel import is_one_launch
from ...tir.core.raw_kernel import RawSignature, has_temporaries, raw_signature
from ...tir.core.ties import Tie, in_place, ties_of
from ...tir.cuda.all_reduce import ALL_REDUCE
from ...tir.cuda.nccl_kernels import AFTER_NCCL
from ..ir.blocks import same_extent
from ..ir.extents import known_extents
from ..ir.kernels import call_vdevice
from ..ir.module_attrs import COMMANDS
from ..ir.op_names import CALL_TIR_INPLACE, CALL_TIR_OPS
from ..ir.requirements import symbols_in
from ..ir.rewriting import fresh_global_var, is_tensor_constant, op_name, walk_bindings


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel."""

    kernel: tvm.ir.GlobalVar
    vdevice: relax.VDevice  # device of the call
    reads: tuple[relax.Expr, ...]  # variables and constants, in the order of the kernel's parameters
    makes: tuple[relax.TensorType, ...]  # types of the results
    scalars: tuple[Any, ...]  # values of the scalars of the kernel's `RawSignature`
    # Index pairs of results (in `makes`) and operands (in `reads`) that share memory, for in-place kernels.
    stored_over: tuple[tuple[int, int], ...] = ()
    # True if it waits for kernels of other devices. Only CUDA graphs run such kernels: NCCL's sums precede them there,
    # and a call launches no graph before it has made all.
    has_peers: bool = False


class KernelCalls:
    """Finds the calls of a module's kernels that command buffers can make.

    Parameters
    ----------
    mod : tvm.IRModule
        Placed module of dispatches.
    separate_kernels : bool
        True if kernels of llvm devices may have temporaries in a workspace (`FormCommandBuffers`).
    """

    def __init__(self, mod: tvm.IRModule, separate_kernels: bool = False) -> None:
        self._mod, self._separate_kernels = mod, separate_kernels
        self._signatures: dict[tvm.ir.GlobalVar, RawSignature | None] = {}
        self._in_place: dict[tuple[tvm.ir.GlobalVar, Tie], tvm.ir.GlobalVar] = {}
        self.used_names = {gv.name_hint for gv in mod.get_global_vars()}  # names of functions
        self.functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}  # new in-place variants of kernels

    def has_peers(self, kernel: tvm.ir.GlobalVar) -> bool:
        """Return whether a kernel waits for kernels of other devices."""
        attrs = getattr(self._mod.functions.get(kernel), "attrs", None) or {}
        return ALL_REDUCE in attrs or AFTER_NCCL in attrs

    def ties(self, kernel: tvm.ir.GlobalVar) -> list[Tie]:
        """Ties of a kernel; empty for kernels with scalars, where indices of parameters and tensors differ."""
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
        """Kernels with in-place variants, which replace some or all of their calls."""
        return list(dict.fromkeys(kernel for kernel, _ in self._in_place))

    def signature(self, kernel: tvm.ir.GlobalVar) -> RawSignature | None:
        """Raw signature of a kernel; None for functions that command buffers cannot call."""
        if kernel not in self._signatures:
            func = self.functions.get(kernel, self._mod.functions.get(kernel))
            fits = isinstance(func, tirx.PrimFunc) and COMMANDS not in func.attrs and self._can_be_called(func)
            self._signatures[kernel] = raw_signature(func) if fits else None
        return self._signatures[kernel]

    def _can_be_called(self, kernel: tirx.PrimFunc) -> bool:
        """Return whether a kernel's device allows calls from a host function.

        Kernels of GPUs must be one launch. Those of CPUs must not have temporaries in a workspace, unless they are
        compiled separately.
        """
        target = kernel.attrs.get("target")
        if target is not None and "gpu" in target.keys:
            return is_one_launch(kernel)
        allowed = self._separate_kernels and target is not None and target.kind.name == "llvm"
        return allowed or not has_temporaries(kernel)

    def of(self, binding: relax.Binding) -> KernelCall | None:
        """The kernel call of a binding; None for other bindings, and for calls that need checks at run time."""
        call = binding.value
        if not isinstance(binding, relax.VarBinding) or op_name(call) not in ("relax.call_tir", CALL_TIR_INPLACE):
            return None
        kernel, operands = call.args[0], call.args[1]
        signature = self.signature(kernel)
        results = _results(call.ty_args[0])
        if signature is None or results is None or not isinstance(operands, relax.Tuple):
            return None
        vdevice = results[0].vdevice or call_vdevice(call)
        if vdevice is None or vdevice.memory_scope != "global":
            return None
        args = [(arg, arg.ty) for arg in operands.fields]
        numbers = [arg for arg, ty in args if isinstance(ty, tvm.ir.PrimType)]
        reads = tuple(arg for arg, ty in args if isinstance(ty, relax.TensorType) and _is_tensor(arg))
        if len(numbers) + len(reads) != len(args) or len(numbers) != len(signature.numbers):
            return None
        inplace_indices = (
            list(map(int, call.attrs.inplace_indices)) if op_name(call) == CALL_TIR_INPLACE else [-1] * len(results)
        )
        in_place = [(i, operands.fields[operand]) for i, operand in enumerate(inplace_indices) if operand >= 0]
        if not all(isinstance(arg, relax.Var) for _, arg in in_place):
            return None  # a constant cannot be overwritten
        types = [ty for _, ty in args if isinstance(ty, relax.TensorType)]
        types += [ty for ty, operand in zip(results, inplace_indices, strict=True) if operand < 0]
        scalars = _scalar_values(signature, types, dict(zip(signature.numbers, numbers, strict=True)))
        pairs = tuple((i, reads.index(arg)) for i, arg in in_place)
        has_peers = self.has_peers(kernel)
        return None if scalars is None else KernelCall(kernel, vdevice, reads, results, scalars, pairs, has_peers)


def _results(ty: tvm.ir.Type) -> tuple[relax.TensorType, ...] | None:
    """Types of a kernel's results; None for nested tuples and for no results."""
    types = tuple(ty.fields) if isinstance(ty, tvm.ir.TupleType) else (ty,)
    return types if types and all(isinstance(field, relax.TensorType) for field in types) else None


def _is_tensor(arg: relax.Expr) -> bool:
    return isinstance(arg, relax.Var) or is_tensor_constant(arg)


def _scalar_values(
    signature: RawSignature, types: Sequence[tvm.ir.Type], numbers: Mapping[tirx.Var, Any]
) -> tuple[Any, ...] | None:
    """The values of a kernel's scalars for tensors of these types; None if any type does not provably fit."""
    if len(types) != len(signature.buffers):
        return None
    values: dict[tirx.Var, Any] = dict(numbers)
    pairs: list[tuple[Any, Any]] = []
    for buffer, dtype, ty in zip(signature.extents, signature.dtypes, types, strict=True):
        extents = known_extents(ty)
        if extents is None or str(ty.dtype) != dtype or len(extents) != len(buffer):
            return None
        for expected, extent in zip(buffer, extents, strict=True):
            if isinstance(expected, tirx.Var):
                pairs.append((values.setdefault(expected, extent), extent))
            else:
                pairs.append((expected, extent))
    if not all(_is_same(expected, extent, values) for expected, extent in pairs):
        return None
    scalars = [_cast_to(values[scalar], str(scalar.ty.dtype)) for scalar in signature.scalars]
    return None if any(scalar is None for scalar in scalars) else tuple(scalars)


def _is_same(expected: Any, extent: Any, values: Mapping[tirx.Var, Any]) -> bool:
    """Return whether an extent over a kernel's own variables is provably that of its operand."""
    if expected is extent:
        return True
    if isinstance(expected, int):
        return isinstance(extent, int) and expected == extent
    substituted = structural_map(
        expected, (tvm.ir.Var, lambda var: _cast_to(values[var], str(var.ty.dtype)) if var in values else var)
    )
    return same_extent(substituted, _cast_to(extent, str(substituted.ty.dtype)))


def _cast_to(value: Any, dtype: str) -> Any:
    """A number cast to an element type; None if the cast may change it."""
    if isinstance(value, int):
        return tirx.const(value, dtype)
    own = str(value.ty.dtype)
    if own == dtype:
        return value
    is_integer = all(name.startswith(("int", "uint")) for name in (own, dtype))
    return value.astype(dtype) if is_integer else None


def sizes_of_peers(func: relax.Function, calls: KernelCalls) -> list[tirx.Var]:
    """Sizes that select the graphs of devices whose kernels wait for each other: those that the work of any depends on.

    A new size of one of them is so a new one of all, and none launches kernels while another one makes its graph. Only
    sizes of the function's parameters are among them: all work may depend on these.
    """
    given = list(dict.fromkeys(size for param in func.params for size in symbols_in(param.ty)))
    if not given:
        return []
    works = [binding.value for binding in walk_bindings(func.body) if op_name(binding.value) in CALL_TIR_OPS]
    devices = [call_vdevice(call) for call in works if calls.has_peers(call.args[0])]
    used: set[tirx.Var] = set()
    for call in works:
        device = call_vdevice(call) if devices else None
        if device is not None and any(same_vdevice(device, each) for each in devices):
            used.update(size for node in (call.ty, call.args[1].ty, *call.args[2:]) for size in symbols_in(node))
    return [size for size in given if size in used]
