"""ExchangeByNccl: exchanges of GPUs by NCCL, in place of kernels that write to other GPUs' memory, and of copies.

Before, on each GPU::

    norm, total = all_reduce(part, addresses, ..., weight)
    other = R.to_vdevice(y, "cuda:1")                    # and more, whose operands are there
    other_1 = R.to_vdevice(z, "cuda:0")

After::

    token = stage(part, addresses, ...)                  # copies the operand to memory that NCCL sums in place
    norm, total = finish(addresses, token, weight)       # its launches follow NCCL's sum
    token = send_0(y, addresses, norm)                   # on cuda:0
    token_1 = send_1(z, addresses, norm_1)               # on cuda:1
    other_1 = receive_0(addresses, token)                # follow NCCL's exchange of both
    other = receive_1(addresses, token_1)

The CUDA graph of the command buffer with `finish` or `receive` has NCCL's kernels before it (`vm.device.nccl_memory`).
The addresses are those of one buffer on each GPU, which all collectives of a function use in turn. A residual of a long
sum, of which each GPU has some rows, is added by `stage`.

Copies between GPUs of a mesh become one exchange with all later ones whose operands are computed before the first, if
every GPU that sends receives: an all-gather, a reduce-scatter and an all-to-all do. Otherwise nothing would read what
follows on a GPU that only sends, and passes would drop it.

Assumes PartitionByMesh. A module without sums over GPUs is returned as it is, and so are functions without them, whose
devices work in queues of their own.

`strategy` is that of `rh.compile`: "nccl" changes all sums, "custom" none, and "auto" those of GPUs of this machine
that do not reach each other's memory. Copies change where all sums of their function do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import tvm
from tvm import relax, tirx

from ...artifact.collectives import ALL_REDUCE_OP, ASKED_FOR, CUSTOM, EXCHANGE_OP, NCCL, CollectiveSpec, check_strategy
from ...artifact.nccl_layout import NCCL_MEMORY, Collective, to_numbers, transfers
from ...artifact.peer_layout import PEER_MEMORY
from ...errors import BuildError
from ...target.vdevice import vdevice_index, vdevices_of
from ...tir.cuda.all_reduce import ALL_REDUCE, RankReduce
from ...tir.cuda.nccl_kernels import (
    AFTER_NCCL,
    EXCHANGE,
    NCCL_SUM,
    Exchange,
    Transfer,
    finish_kernel,
    receive_kernel,
    send_kernel,
    stage_kernel,
)
from ...vm.device.cuda_copies import can_access_peer
from ..ir.blocks import Block, rewrite_function, shape_of, static_form
from ..ir.declare import declare_pass
from ..ir.kernels import called_prim_func, opaque_kernel
from ..ir.module_attrs import COMMANDS
from ..ir.op_names import CALL_TIR, TRANSFER
from ..ir.rewriting import (
    copy_module,
    fresh_global_var,
    global_vars_in,
    op_name,
    relax_functions,
    typed,
    walk_bindings,
)
from .gpu_sums import Group
from .sharding import known


def exchange_by_nccl(mod: tvm.IRModule, strategy: str = NCCL) -> tvm.IRModule:
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
    check_strategy(strategy, "ExchangeByNccl")
    if strategy == NCCL and any(_is_peer_kernel(func) and "target" in func.attrs for func in mod.functions.values()):
        raise BuildError("ExchangeByNccl: kernels that sum have targets; expected a module before FormDispatches")
    rewriter = _Rewriter(mod, strategy)
    functions = {gv: rewrite_function(func, rewriter.rewrite) for gv, func in relax_functions(mod)}
    if not rewriter.kernels:
        return mod
    result = {**dict(mod.functions.items()), **functions, **rewriter.kernels}
    called = {gv.name_hint for func in functions.values() for gv in relax.analysis.all_global_vars(func)}
    unused = {gv for gv, func in result.items() if _is_peer_kernel(func) and gv.name_hint not in called}
    return copy_module(mod, {gv: func for gv, func in result.items() if gv not in unused})


ExchangeByNccl = declare_pass("ExchangeByNccl", exchange_by_nccl)


def collectives_of(mod: tvm.IRModule) -> list[CollectiveSpec]:
    """Collectives of a module after PartitionByMesh, one for all GPUs of each."""
    collectives = []
    for gv, func in relax_functions(mod):
        meshes: dict[relax.Var, Group] = {}
        for binding in walk_bindings(func):
            if (mesh := _mesh_of(binding.value)) is not None:
                meshes[binding.var] = mesh
            own, exchange = _part_of(mod, binding.value), _exchange_of(mod, binding.value)
            if exchange is not None:
                collectives.append(replace(exchange, function=gv.name_hint, variable=str(binding.var.name)))
            if own is None or own.rank:
                continue
            reduce, operands = own.reduce, binding.value.args[1].fields
            joined = ["norm"] * (reduce.norm is not None) + ["residual"] * reduce.has_residual
            algorithm = "NCCL" if own.why else "one-shot" if reduce.is_short else "two-shot"
            why = own.why or f"{'up to' if reduce.is_short else 'more than'} {reduce.max_short_bytes >> 10} KB"
            mesh = next(meshes[operand] for operand in operands if operand in meshes)
            name = str(binding.var.name).removesuffix("_and_norm")
            collectives.append(
                CollectiveSpec(ALL_REDUCE_OP, gv.name_hint, name, mesh, 4 * reduce.count, tuple(joined), algorithm, why)
            )
    return collectives


def check_collectives_in_graphs(mod: tvm.IRModule) -> None:
    """Require that all of NCCL's collectives are parts of CUDA graphs; BuildError otherwise."""
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
                f"function {gv.name_hint!r} has a collective of NCCL outside of a CUDA graph; expected rh.compile with "
                'command buffers, without symbolic sizes in them, or allreduce_strategy="custom"'
            )


def _exchange_of(mod: tvm.IRModule, value: relax.Expr) -> CollectiveSpec | None:
    """The exchange that the kernel of its first GPU follows, without a function and a name."""
    gv = called_prim_func(mod, value) if op_name(value) == CALL_TIR else None
    if gv is None or EXCHANGE not in mod.functions[gv].attrs:
        return None
    _, rank, *mesh = map(int, mod.functions[gv].attrs[AFTER_NCCL])
    sent = transfers(tuple(map(int, mod.functions[gv].attrs[EXCHANGE])))
    if rank > min(end for source, target, _ in sent for end in (source, target)):
        return None
    nbytes = sum(nbytes for _, _, nbytes in sent)
    return CollectiveSpec(EXCHANGE_OP, "", "", tuple(mesh), nbytes, (), "NCCL", "sums are NCCL's")


def _mesh_of(value: relax.Expr) -> Group | None:
    """The mesh of a call that returns addresses of its memory."""
    if op_name(value) != "relax.call_pure_packed" or not isinstance(value.args[0], relax.ExternFunc):
        return None
    name, numbers = str(value.args[0].global_symbol), [int(arg) for arg in value.args[1:] if tvm.ir.is_prim_expr(arg)]
    if name == NCCL_MEMORY:
        return tuple(numbers[2 : 2 + numbers[1]])
    return tuple(numbers[2:]) if name == PEER_MEMORY else None


def _part_of(mod: tvm.IRModule, value: relax.Expr) -> RankReduce | None:
    gv = called_prim_func(mod, value) if op_name(value) == CALL_TIR else None
    attributes = {} if gv is None else mod.functions[gv].attrs
    text = attributes.get(ALL_REDUCE, attributes.get(NCCL_SUM))
    return None if text is None else RankReduce.from_json(str(text))


def _is_peer_kernel(func: tvm.ir.BaseFunc) -> bool:
    return ALL_REDUCE in (func.attrs or {})


@cache
def unreachable(gpus: tuple[int, ...]) -> tuple[int, int] | None:
    """Return a pair of GPUs of this machine, the first of which cannot access the memory of the second."""
    pairs = itertools.permutations(gpus, 2)
    return next((pair for pair in pairs if can_access_peer(*pair) is False), None)


@dataclass(frozen=True)
class _Transfers:
    """Transfers that become one exchange."""

    mesh: Group
    members: list[int]  # indices of their bindings
    exchange: Exchange


class _Rewriter:
    """Rewrites the blocks of a module."""

    def __init__(self, mod: tvm.IRModule, strategy: str) -> None:
        self.kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}  # new kernels
        self.vdevices = vdevices_of(mod)  # devices of the module
        self._mod, self._strategy = mod, strategy
        self._used_names = {gv.name_hint for gv in mod.get_global_vars()}
        self._made: dict[tuple[object, ...], tvm.ir.GlobalVar] = {}

    def rewrite(self, block: Block) -> list[relax.Binding] | None:
        """The bindings of a block with exchanges by NCCL; None without any."""
        sums: dict[int, RankReduce] = {}
        stays = False
        for index, binding in enumerate(block.bindings):
            own = _part_of(self._mod, binding.value)
            if own is None or own.why:
                continue
            why = self._why(_mesh_of(block.definition(binding.value.args[1].fields[1])) or ())
            if why:
                sums[index] = replace(own, slot=0, slot_bytes=0, why=why)
            stays |= not why
        if not sums:
            return None
        meshes = {_mesh_of(block.definition(block.bindings[index].value.args[1].fields[1])) for index in sums}
        exchanges = [] if stays else self._exchanges(block, [mesh for mesh in meshes if mesh])
        return _BlockWriter(self, block, sums, exchanges, stays).write()

    def _why(self, mesh: Group) -> str:
        """The reason why NCCL sums; empty if kernels do."""
        if self._strategy == CUSTOM or not mesh:
            return ""
        if self._strategy == NCCL:
            return f'{ASKED_FOR}"{NCCL}"'
        pair = unreachable(tuple(int(self.vdevices[position].vdevice_id) for position in mesh))
        return "" if pair is None else f"GPU {pair[0]} cannot access the memory of GPU {pair[1]}"

    def _exchanges(self, block: Block, meshes: Sequence[Group]) -> list[_Transfers]:
        """Transfers between GPUs of the same mesh, each with later ones whose operands are computed before."""
        pending: dict[int, tuple[Group, Transfer]] = {}
        for index, binding in enumerate(block.bindings):
            value, shape = binding.value, shape_of(binding.var)
            if op_name(value) != TRANSFER or not isinstance(value.args[0], relax.Var) or shape is None:
                continue
            extents, source = [known(extent) or 0 for extent in shape], value.args[0].ty.vdevice
            if source is None or 0 in extents:
                continue
            ends = [vdevice_index(vdevice, self.vdevices) for vdevice in (source, value.attrs.dst_vdevice)]
            mesh = next((mesh for mesh in meshes if ends[0] != ends[1] and set(ends) <= set(mesh)), None)
            if mesh is not None:
                ranks = mesh.index(ends[0]), mesh.index(ends[1])
                pending[index] = mesh, Transfer(*ranks, tuple(extents), str(binding.var.ty.dtype))
        groups: list[_Transfers] = []
        while pending:
            first, (mesh, _) = next(iter(pending.items()))
            members = [
                index
                for index, (other, _) in pending.items()
                if other == mesh and block.positions.get(block.bindings[index].value.args[0], -1) < first
            ]
            sent = tuple(pending.pop(index)[1] for index in members)
            if {each.source for each in sent} == {each.target for each in sent}:
                groups.append(_Transfers(mesh, members, Exchange(len(mesh), sent)))
        return groups

    def kernel(self, name: str, make: Callable[..., tirx.PrimFunc], *arguments: Any) -> tvm.ir.GlobalVar:
        """A kernel of the module, made on first request."""
        key = (make, *arguments)
        if key not in self._made:
            kernel = opaque_kernel(make(*arguments))
            gv = fresh_global_var(name, kernel.ty, self._used_names)
            self._made[key] = gv
            self.kernels[gv] = kernel
        return self._made[key]


class _BlockWriter:
    """Writes the bindings of a block."""

    def __init__(
        self,
        rewriter: _Rewriter,
        block: Block,
        sums: dict[int, RankReduce],  # sums by NCCL by the indices of their bindings
        exchanges: Sequence[_Transfers],
        stays: bool,  # True if kernels sum, too
    ) -> None:
        self._rewriter, self._block, self._sums, self._stays = rewriter, block, sums, stays
        self._exchanges = {each.members[0]: each for each in exchanges}
        self._sent = {index for each in exchanges for index in each.members}
        self._collectives: dict[Group, dict[Collective, int]] = {}
        self._memory: dict[tuple[Group, int], relax.Var] = {}  # by mesh and device
        self._last: dict[int, relax.Var] = {}  # result of the last collective by device
        self._bindings: list[relax.Binding] = []

    def write(self) -> list[relax.Binding]:
        """Write all bindings, those of the memory first."""
        block = self._block
        for index, binding in enumerate(block.bindings):
            if index in self._exchanges:
                self._exchange(self._exchanges[index])
            elif index in self._sums:
                self._sum(binding, self._sums[index])
            elif index not in self._sent and not self._is_unused_memory(binding):
                self._bindings.append(binding)
        memory = []
        for (mesh, device), var in self._memory.items():
            numbers = [device, len(mesh), *mesh, *to_numbers(self._collectives[mesh])]
            call = relax.op.call_pure_packed(NCCL_MEMORY, *map(relax.prim_value, numbers), ty_args=[var.ty])
            memory.append(relax.VarBinding(var, typed(call, var.ty)))
        return [*memory, *self._bindings]

    def _is_unused_memory(self, binding: relax.Binding) -> bool:
        users = self._block.users.get(binding.var, [])
        return _mesh_of(binding.value) is not None and bool(users) and all(user in self._sums for user in users)

    def _number(self, mesh: Group, collective: Collective) -> int:
        numbers = self._collectives.setdefault(mesh, {})
        return numbers.setdefault(collective, len(numbers))

    def _addresses(self, mesh: Group, device: int) -> relax.Var:
        if (mesh, device) not in self._memory:
            ty = relax.TensorType([len(mesh)], "int64", self._rewriter.vdevices[device])
            self._memory[mesh, device] = self._block.new_var("nccl_memory", ty)
        return self._memory[mesh, device]

    def _call(self, var: relax.Var, kernel: tvm.ir.GlobalVar, operands: Sequence[relax.Expr]) -> relax.Var:
        """Bind a variable to a call of a kernel."""
        types = list(var.ty.fields) if isinstance(var.ty, tvm.ir.TupleType) else var.ty
        call = relax.call_tir(kernel, relax.Tuple(list(operands)), types)
        self._bindings.append(relax.VarBinding(var, typed(call, var.ty)))
        return var

    def _after(self, device: int, operand: relax.Expr) -> relax.Expr:
        """A result of the last collective of a device; without any, an operand of the first."""
        last = self._last.get(device, operand)
        if not isinstance(last.ty, tvm.ir.TupleType):
            return last
        fields = (each for each in reversed(self._bindings) if isinstance(each.value, relax.TupleGetItem))
        return next(each.var for each in fields if each.value.tuple_value.same_as(last) and not each.value.index)

    def _token(self, name: str, bases: relax.Var) -> relax.Var:
        return self._block.new_var(name, relax.TensorType([1], "float32", bases.ty.vdevice))

    def _only_orders(self, var: relax.Var) -> bool:
        """Return whether a sum is computed only because kernels need two of them."""
        users = self._block.users.get(var, [])
        fields = [self._block.bindings[user].value.args[1].fields for user in users if user in self._sums]
        is_after = all(operands[2].same_as(var) and not operands[0].same_as(var) for operands in fields)
        return bool(users) and len(fields) == len(users) and is_after and self._block.is_local(var)

    def _sum(self, binding: relax.VarBinding, own: RankReduce) -> None:
        x, bases, after, *rest = binding.value.args[1].fields
        if not self._stays and self._only_orders(binding.var):
            return
        mesh = _mesh_of(self._block.definition(bases)) or ()
        device, number = mesh[own.rank], self._number(mesh, (own.reduce.count,))
        # Kernels that stay are in the order that they were given.
        after = after if self._stays else self._after(device, x)
        residual = [rest.pop(0)] if own.reduce.has_residual else []
        name, form, bases = f"{own.rank}_of_{own.reduce.ranks}", static_form(after), self._addresses(mesh, device)
        make = self._rewriter.kernel
        stage = make(f"stage_{name}", stage_kernel, own, form)
        finish = make(f"all_reduce_nccl_{name}", finish_kernel, own, number, mesh)
        token = self._token(f"{binding.var.name}_token", bases)
        self._call(token, stage, [x, bases, after, *residual])
        self._last[device] = self._call(binding.var, finish, [bases, token, *rest])

    def _exchange(self, group: _Transfers) -> None:
        exchange, mesh, make = group.exchange, group.mesh, self._rewriter.kernel
        number = self._number(mesh, exchange.description)
        bindings = [self._block.bindings[index] for index in group.members]
        ends = list(zip(exchange.transfers, bindings, strict=True))
        involved = sorted({rank for each in exchange.transfers for rank in (each.source, each.target)})
        for rank in involved:
            device, operands = mesh[rank], [b.value.args[0] for each, b in ends if each.source == rank]
            bases, after = self._addresses(mesh, device), self._after(device, operands[0])
            send = make(f"send_{rank}_of_{exchange.ranks}", send_kernel, exchange, rank, static_form(after))
            self._last[device] = self._call(self._token("sent_token", bases), send, [*operands, bases, after])
        for rank in involved:
            device, received = mesh[rank], [b.var for each, b in ends if each.target == rank]
            bases = self._addresses(mesh, device)
            receive = make(f"receive_{rank}_of_{exchange.ranks}", receive_kernel, exchange, rank, number, mesh)
            var = received[0]
            if len(received) > 1:
                var = self._block.new_var("received", tvm.ir.TupleType([each.ty for each in received]))
            self._last[device] = self._call(var, receive, [bases, self._last[device]])
            for field, each in enumerate(received if len(received) > 1 else ()):
                self._bindings.append(relax.VarBinding(each, relax.TupleGetItem(var, field)))
