"""SumByNccl: all-reduces of GPUs by NCCL in place of kernels that write to other GPUs' memory.

Before, on each GPU::

    norm, total = all_reduce(part, addresses, ..., weight)

After::

    token = stage(part, addresses, ...)                  # copies the operand to memory that NCCL sums in place
    norm, total = finish(addresses, token, weight)       # its launches follow NCCL's sum

The CUDA graph of the command buffer with `finish` has NCCL's sum before that kernel (`vm.device.nccl_memory`). The
addresses are those of one buffer on each GPU, which all sums of a function use. A residual of a long sum, of which each
GPU has some rows, is added by `stage`.

Assumes PartitionByMesh. A module without such kernels is returned as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relax, tirx

from ...artifact.peer_layout import NCCL_MEMORY
from ...tir.cuda.all_reduce import ALL_REDUCE, NCCL, RankReduce, finish_kernel, stage_kernel
from ..ir.blocks import Block, rewrite_function, shape_of
from ..ir.declare import declare_pass
from ..ir.kernels import called_prim_func, opaque_kernel
from ..ir.rewriting import copy_module, fresh_global_var, relax_functions, typed


def sum_by_nccl(mod: tvm.IRModule, min_bytes: int = 0) -> tvm.IRModule:
    """See the module's docstring.

    Parameters
    ----------
    mod : tvm.IRModule
    min_bytes : int
        Sums of fewer bytes stay kernels.
    """
    rewriter = _Rewriter(mod, min_bytes)
    functions = {gv: rewrite_function(func, rewriter.rewrite) for gv, func in relax_functions(mod)}
    if not rewriter.kernels:
        return mod
    result = {**dict(mod.functions.items()), **functions, **rewriter.kernels}
    called = {arg.name_hint for func in functions.values() for arg in relax.analysis.all_global_vars(func)}
    unused = {gv for gv, func in result.items() if ALL_REDUCE in (func.attrs or {}) and gv.name_hint not in called}
    return copy_module(mod, {gv: func for gv, func in result.items() if gv not in unused})


SumByNccl = declare_pass("SumByNccl", sum_by_nccl)


class _Rewriter:
    """Rewrites the blocks of a module.

    Attributes
    ----------
    kernels : dict
        New kernels.
    """

    def __init__(self, mod: tvm.IRModule, min_bytes: int) -> None:
        self.kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        self._mod, self._min_bytes = mod, min_bytes
        self._used_names = {gv.name_hint for gv in mod.get_global_vars()}
        self._made: dict[tuple[object, ...], tvm.ir.GlobalVar] = {}

    def rewrite(self, block: Block) -> list[relax.Binding] | None:
        """The bindings of a block with sums by NCCL; None without any."""
        sums = {}
        for index, binding in enumerate(block.bindings):
            own = self._sum_of(binding.value)
            if own is not None and 4 * own.reduce.count >= self._min_bytes:
                sums[index] = own
        if not sums:
            return None
        counts: dict[relax.Var, set[int]] = {}
        for index, own in sums.items():
            counts.setdefault(block.bindings[index].value.args[1].fields[1], set()).add(own.reduce.count)
        others = {bases for bases in counts if any(user not in sums for user in block.users[bases])}
        memory = {bases: block.new_var("nccl_memory", bases.ty) for bases in counts}
        before: dict[relax.Var, relax.Expr] = {}  # results that only order kernels
        bindings: list[relax.Binding] = []
        for index, binding in enumerate(block.bindings):
            var, value = binding.var, binding.value
            if var in memory:
                bindings += [binding] if var in others else []
                _, device, _, *mesh = value.args
                counted = [relax.prim_value(count) for count in sorted(counts[var])]
                numbers = [device, relax.prim_value(len(mesh)), *mesh, *counted]
                call = relax.op.call_pure_packed(NCCL_MEMORY, *numbers, ty_args=[var.ty])
                bindings.append(relax.VarBinding(memory[var], typed(call, var.ty)))
            elif index not in sums:
                bindings.append(binding)
            elif self._only_orders(block, var, sums):
                before[var] = before.get(value.args[1].fields[2], value.args[1].fields[2])
            else:
                mesh = [int(position) for position in block.definition(value.args[1].fields[1]).args[3:]]
                bindings += self._bindings(block, binding, sums[index], mesh, memory, before)
        return bindings

    def _sum_of(self, value: relax.Expr) -> RankReduce | None:
        gv = called_prim_func(self._mod, value)
        text = None if gv is None else self._mod.functions[gv].attrs.get(ALL_REDUCE)
        is_kernel = text is not None and NCCL not in self._mod.functions[gv].attrs
        return RankReduce.from_json(str(text)) if is_kernel else None

    def _only_orders(self, block: Block, var: relax.Var, sums: dict[int, RankReduce]) -> bool:
        """Return whether a sum is computed only because kernels need two of them."""
        users = block.users.get(var, [])
        fields = [block.bindings[user].value.args[1].fields for user in users if user in sums]
        is_after = all(operands[2].same_as(var) and not operands[0].same_as(var) for operands in fields)
        return bool(users) and len(fields) == len(users) and is_after and block.is_local(var)

    def _bindings(
        self,
        block: Block,
        binding: relax.VarBinding,
        own: RankReduce,
        mesh: Sequence[int],
        memory: dict[relax.Var, relax.Var],
        before: dict[relax.Var, relax.Expr],
    ) -> list[relax.Binding]:
        x, bases, after, *rest = binding.value.args[1].fields
        after, bases = before.get(after, after), memory[bases]
        residual = [rest.pop(0)] if own.reduce.has_residual else []
        form = tuple(int(extent) for extent in shape_of(after) or ()), str(after.ty.dtype)
        name = f"{own.rank}_of_{own.reduce.ranks}"
        stage = self._kernel(("stage", name, own, form), lambda: stage_kernel(own, form))
        finish = self._kernel(("all_reduce_nccl", name, own, *mesh), lambda: finish_kernel(own, mesh))
        ty = relax.TensorType([1], "float32", bases.ty.vdevice)
        token = block.new_var(f"{binding.var.name}_token", ty)
        staged = relax.call_tir(stage, relax.Tuple([x, bases, after, *residual]), ty)
        types = binding.value.ty_args[0]
        types = list(types.fields) if isinstance(types, tvm.ir.TupleType) else types
        finished = relax.call_tir(finish, relax.Tuple([bases, token, *rest]), types)
        return [
            relax.VarBinding(token, typed(staged, ty)),
            relax.VarBinding(binding.var, typed(finished, binding.var.ty)),
        ]

    def _kernel(self, key: tuple[object, ...], make: Callable[[], tirx.PrimFunc]) -> tvm.ir.GlobalVar:
        if key not in self._made:
            kernel = opaque_kernel(make())
            gv = fresh_global_var(f"{key[0]}_{key[1]}", kernel.ty, self._used_names)
            self._made[key] = gv
            self.kernels[gv] = kernel
        return self._made[key]
