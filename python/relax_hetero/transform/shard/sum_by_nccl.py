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

`strategy` is that of `rh.compile`: "nccl" changes all sums, "custom" none, and "auto" those of GPUs of this machine
that do not reach each other's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import tvm
from tvm import relax, tirx

from ...artifact.collectives import CUSTOM, NCCL, CollectiveSpec, check_strategy
from ...artifact.peer_layout import NCCL_MEMORY, PEER_MEMORY
from ...errors import BuildError
from ...target.vdevice import vdevices_of
from ...tir.cuda.all_reduce import AFTER_NCCL, ALL_REDUCE, LL_BYTES, RankReduce, finish_kernel, stage_kernel
from ...vm.device.cuda_copies import can_access_peer
from ..ir.blocks import Block, rewrite_function, shape_of
from ..ir.declare import declare_pass
from ..ir.kernels import called_prim_func, opaque_kernel
from ..ir.module_attrs import COMMANDS
from ..ir.op_names import CALL_TIR
from ..ir.rewriting import (
    copy_module,
    fresh_global_var,
    global_vars_in,
    op_name,
    relax_functions,
    typed,
    walk_bindings,
)


def sum_by_nccl(mod: tvm.IRModule, strategy: str = NCCL) -> tvm.IRModule:
    """See the module's docstring.

    Parameters
    ----------
    mod : tvm.IRModule
    strategy : str
        ``"auto"``, ``"custom"`` or ``"nccl"``, as for `rh.compile`.

    Raises
    ------
    BuildError
        For another strategy, and "nccl" for a module whose kernels have targets already.
    """
    check_strategy(strategy, "SumByNccl")
    if strategy == NCCL and any(_is_peer_kernel(func) and "target" in func.attrs for func in mod.functions.values()):
        raise BuildError("SumByNccl: kernels that sum have targets; expected a module before FormDispatches")
    rewriter = _Rewriter(mod, strategy)
    functions = {gv: rewrite_function(func, rewriter.rewrite) for gv, func in relax_functions(mod)}
    if not rewriter.kernels:
        return mod
    result = {**dict(mod.functions.items()), **functions, **rewriter.kernels}
    called = {gv.name_hint for func in functions.values() for gv in relax.analysis.all_global_vars(func)}
    unused = {gv for gv, func in result.items() if _is_peer_kernel(func) and gv.name_hint not in called}
    return copy_module(mod, {gv: func for gv, func in result.items() if gv not in unused})


SumByNccl = declare_pass("SumByNccl", sum_by_nccl)


def collectives_of(mod: tvm.IRModule) -> list[CollectiveSpec]:
    """All-reduces of a module after PartitionByMesh, one for all GPUs of each."""
    collectives = []
    for gv, func in relax_functions(mod):
        meshes: dict[relax.Var, tuple[int, ...]] = {}
        for binding in walk_bindings(func):
            if (mesh := _mesh_of(binding.value)) is not None:
                meshes[binding.var] = mesh
            own = _part_of(mod, binding.value)
            if own is None or own.rank:
                continue
            reduce, operands = own.reduce, binding.value.args[1].fields
            joined = ["norm"] * (reduce.norm is not None) + ["residual"] * reduce.has_residual
            algorithm = "NCCL" if own.why else "one-shot" if reduce.is_short else "two-shot"
            why = own.why or f"{'up to' if reduce.is_short else 'more than'} {LL_BYTES >> 10} KB"
            mesh = next(meshes[operand] for operand in operands if operand in meshes)
            name = str(binding.var.name).removesuffix("_and_norm")
            collectives.append(
                CollectiveSpec(gv.name_hint, name, mesh, 4 * reduce.count, tuple(joined), algorithm, why)
            )
    return collectives


def check_sums_in_graphs(mod: tvm.IRModule) -> None:
    """Require that all of NCCL's sums are parts of CUDA graphs; BuildError otherwise."""
    needs_graph = {gv for gv, func in mod.functions.items() if AFTER_NCCL in (func.attrs or {})}
    for gv, func in mod.functions.items():
        called = (
            {called_prim_func(mod, binding.value) for binding in walk_bindings(func)}
            if isinstance(func, relax.Function)
            else set()
        )
        if COMMANDS in (func.attrs or {}):
            called = set(global_vars_in(func.body))
        if called & needs_graph:
            raise BuildError(
                f"function {gv.name_hint!r} has a sum of NCCL outside of a CUDA graph; expected rh.compile with "
                'command buffers, without symbolic sizes in them, or allreduce_strategy="custom"'
            )


def _mesh_of(value: relax.Expr) -> tuple[int, ...] | None:
    """The mesh of a call that returns addresses of its memory."""
    if op_name(value) != "relax.call_pure_packed" or not isinstance(value.args[0], relax.ExternFunc):
        return None
    name, numbers = str(value.args[0].global_symbol), [int(arg) for arg in value.args[1:] if tvm.ir.is_prim_expr(arg)]
    if name == NCCL_MEMORY:
        return tuple(numbers[2 : 2 + numbers[1]])
    return tuple(numbers[2:]) if name == PEER_MEMORY else None


def _part_of(mod: tvm.IRModule, value: relax.Expr) -> RankReduce | None:
    gv = called_prim_func(mod, value) if op_name(value) == CALL_TIR else None
    text = None if gv is None else mod.functions[gv].attrs.get(ALL_REDUCE)
    return None if text is None else RankReduce.from_json(str(text))


def _is_peer_kernel(func: tvm.ir.BaseFunc) -> bool:
    return ALL_REDUCE in (func.attrs or {}) and AFTER_NCCL not in func.attrs


@cache
def unreachable(gpus: tuple[int, ...]) -> tuple[int, int] | None:
    """Return a pair of GPUs of this machine, the first of which cannot access the memory of the second."""
    pairs = itertools.permutations(gpus, 2)
    return next((pair for pair in pairs if can_access_peer(*pair) is False), None)


class _Rewriter:
    """Rewrites the blocks of a module.

    Attributes
    ----------
    kernels : dict
        New kernels.
    """

    def __init__(self, mod: tvm.IRModule, strategy: str) -> None:
        self.kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        self._mod, self._strategy, self._vdevices = mod, strategy, vdevices_of(mod)
        self._used_names = {gv.name_hint for gv in mod.get_global_vars()}
        self._made: dict[tuple[object, ...], tvm.ir.GlobalVar] = {}

    def rewrite(self, block: Block) -> list[relax.Binding] | None:
        """The bindings of a block with sums by NCCL; None without any."""
        sums: dict[int, RankReduce] = {}
        for index, binding in enumerate(block.bindings):
            own = _part_of(self._mod, binding.value)
            if own is None or own.why or binding.value.args[1].fields[1] not in block.positions:
                continue
            if why := self._why(block, binding):
                sums[index] = replace(own, why=why)
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
                mesh = _mesh_of(value) or ()
                numbers = [int(value.args[1]), len(mesh), *mesh, *sorted(counts[var])]
                call = relax.op.call_pure_packed(NCCL_MEMORY, *map(relax.prim_value, numbers), ty_args=[var.ty])
                bindings.append(relax.VarBinding(memory[var], typed(call, var.ty)))
            elif index not in sums:
                bindings.append(binding)
            elif self._only_orders(block, var, sums):
                before[var] = before.get(value.args[1].fields[2], value.args[1].fields[2])
            else:
                mesh = _mesh_of(block.definition(value.args[1].fields[1])) or ()
                bindings += self._bindings(block, binding, sums[index], mesh, memory, before)
        return bindings

    def _why(self, block: Block, binding: relax.VarBinding) -> str:
        """The reason why NCCL sums; empty if kernels do."""
        if self._strategy == CUSTOM:
            return ""
        if self._strategy == NCCL:
            return f'allreduce_strategy="{NCCL}"'
        mesh = _mesh_of(block.definition(binding.value.args[1].fields[1])) or ()
        pair = unreachable(tuple(int(self._vdevices[position].vdevice_id) for position in mesh))
        return "" if pair is None else f"GPU {pair[0]} cannot access the memory of GPU {pair[1]}"

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
