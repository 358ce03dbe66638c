"""Sums over the GPUs of a mesh, by kernels that write to each other's memory, with the norms of rows that follow them.

Before, on each GPU, where only the first one adds a residual::

    total = sum of what all GPUs have
    norm = R.astype(total * R.rsqrt(R.mean(total * total, -1) + eps) * weight, "float16")
    next = R.add(total, product)               # a part of the next sum

After, for a short operand::

    norm, total = all_reduce(part, addresses, ..., weight)
    next = R.add(total, product)

After, for a long one, of which each GPU adds and keeps a part of the rows::

    norm, rows = all_reduce(part, addresses, ..., weight)
    ...                                        # `rows` is an operand of the next sum's kernel, on all GPUs

A residual of the first long sum that all GPUs have is an operand of its kernels, too: each adds its part of the rows.

If a row of the sum is taken after it, such as that whose logits a prefill returns, the GPU that keeps it has the row,
and the others zeros, as parts of the next sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import tvm
from tvm import relax, te, tirx

from ...artifact.peer_layout import PEER_MEMORY
from ...tir.cuda.all_reduce import AllReduce, RowNorm, all_reduce_kernel, slots_of
from ..ir.blocks import same_shape, shape_of, static_form, used_vars
from ..ir.kernels import opaque_kernel
from ..ir.relax_expressions import scalar_of
from ..ir.rewriting import is_tensor_constant, op_name

Group: TypeAlias = "tuple[int, ...]"
"""Positions of devices in the module's list, which exchange values: those of a mesh, or along an axis of it."""


@dataclass(frozen=True)
class Sum:
    """An all-reduce that is not lowered yet: which of its results are used is known at the end."""

    results: list[relax.Var]  # the sum on each device
    parts: list[relax.Expr]  # summand of each device
    group: Group

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the sum, which is static."""
        return tuple(int(extent) for extent in shape_of(self.results[0]) or ())


class Writer(Protocol):
    """Writer of the bindings and kernels of a function."""

    def new_local(self, name: str, ty: tvm.ir.Type) -> relax.Var:
        """Make a variable of the function."""

    def add_binding(self, var: relax.Var, value: relax.Expr) -> None:
        """Bind a value whose type is that of the variable."""

    def keep(self, binding: relax.Binding) -> None:
        """Add a binding that was written before."""

    def add_kernel(self, kernel: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        """Add a kernel to the module, under a name of its own."""

    def new_addresses(self, function: str, numbers: Sequence[relax.Expr], count: int, device: int) -> relax.Var:
        """Bind addresses, (count,) of int64, that a function of the run time returns."""


@dataclass(frozen=True)
class _Norm:
    """Norm of a variable's rows."""

    norm: RowNorm
    weights: list[relax.Expr]  # constants, (width,) of float32: the weight, then the bias of a layer norm
    bindings: list[relax.VarBinding]  # bindings that compute it, the result's last

    @property
    def result(self) -> relax.Var:
        """The variable of the norm's result."""
        return self.bindings[-1].var


@dataclass
class _Plan:
    """Plan of a sum: what its kernels compute."""

    reduce: AllReduce
    parts: list[relax.Expr]  # operand of each GPU, without the residual if there is one
    norms: list[_Norm] = field(default_factory=list)  # norm on each GPU; none if the kernels only add
    # True if a GPU uses the sum, or its part of the rows, beside the norm's result.
    keeps_sum: list[bool] = field(default_factory=list)
    residuals: list[relax.Expr] = field(default_factory=list)  # residual, or its rows, of each GPU, if there is one
    rows: list[relax.Var] = field(default_factory=list)  # rows of a long sum that each GPU keeps


@dataclass(frozen=True)
class _TakenRow:
    """Row of a long sum as a part of a GPU: zeros if another GPU keeps it."""

    rows: relax.Var  # rows of the sum that the GPU keeps
    total: int  # rows of all GPUs
    rank: int  # number of the GPU in its group


_NormPattern: TypeAlias = "tuple[float | None, list[relax.Expr], list[relax.VarBinding]]"
"""Epsilon, weights and bindings of a norm."""


class GpuSums:
    """Writer of all-reduces by kernels of GPUs."""

    def __init__(
        self,
        writer: Writer,
        items: Sequence[relax.VarBinding | Sum],  # the function in order
        sums: list[Sum],  # items that are added by kernels, in order
        outputs: Iterable[relax.Var],  # results of the function
        # The same value on each device, for values that several devices have.
        copies: Mapping[relax.Var, Mapping[int, relax.Expr]],
    ) -> None:
        self._writer, self._copies = writer, copies
        self._users = _users_of(items)
        self._values = {item.var: item.value for item in items if not isinstance(item, Sum)}
        self._order = {
            var: number
            for number, item in enumerate(items)
            for var in (item.results if isinstance(item, Sum) else [item.var])
        }
        self._outputs = set(outputs)
        self._replaced: set[relax.Var] = set()
        self._taken: dict[relax.Var, _TakenRow] = {}
        plain = {id(each): AllReduce(each.shape, len(each.group)) for each in sums}
        self._plans = {id(each): _Plan(plain[id(each)], list(each.parts)) for each in sums}
        for each in reversed(sums):  # a sum becomes the residual of one whose plan is made
            self._plan(each)
        for each in sums:
            self._join_copies(each)
        # A mesh has memory of its own. Calls follow each other, so that a function's only sum is computed twice.
        counts = Counter(each.group for each in sums)
        self._slots = {group: iter(slots_of(max(2, count))) for group, count in counts.items()}
        self._is_alone = {group: count == 1 for group, count in counts.items()}
        reduces = [*plain.values(), *(plan.reduce for plan in self._plans.values())]
        self._slot_bytes = max((reduce.slot_bytes for reduce in reduces), default=0)
        # Before all other bindings, so that also the product before the first sum can send (`overlapped_sums`).
        self._addresses = {(group, device): self._new_addresses(group, device) for group in counts for device in group}
        self._last: dict[int, relax.Expr] = {}

    # -- plans

    def _plan(self, item: Sum) -> None:
        plan = self._plans[id(item)]
        norms = [norm for result in item.results if (norm := self._norm_of(result)) is not None]
        if len(norms) < len(item.results) or len({norm.norm for norm in norms}) > 1:
            return
        reduce = replace(plan.reduce, norm=norms[0].norm)
        if not reduce.supports_rows:
            return
        readers = [self._other_users(result, norm) for result, norm in zip(item.results, norms, strict=True)]
        keeps_sum = [
            bool(users) or result in self._outputs for users, result in zip(readers, item.results, strict=True)
        ]
        if not reduce.is_short and any(keeps_sum):
            all_readers = [user for users in readers for user in users]
            is_one = len(all_readers) == 1 and not self._outputs.intersection(item.results)
            if not is_one or not self._joins(item, all_readers[0]):
                return
            keeps_sum = [True] * len(norms)
        elif not reduce.is_short and (takes := self._row_takes(item)):
            plan.rows = self._new_rows(item, reduce)
            ends = enumerate(zip(takes, plan.rows, strict=True))
            self._taken |= {take.var: _TakenRow(rows, item.shape[0], rank) for rank, (take, rows) in ends}
            keeps_sum = [True] * len(norms)
        plan.reduce, plan.norms, plan.keeps_sum = reduce, norms, keeps_sum
        self._replaced.update(binding.var for norm in norms for binding in norm.bindings)

    def _joins(self, item: Sum, reader: relax.VarBinding | Sum) -> bool:
        """Make a sum the residual of the next one, if its reader only adds it to a part of that."""
        if isinstance(reader, Sum) or op_name(reader.value) != "relax.add" or reader.var in self._outputs:
            return False
        users = self._users.get(reader.var, [])
        users = [user for user in users if isinstance(user, Sum) or user.var not in self._taken]
        if len(users) != 1 or id(users[0]) not in self._plans:
            return False
        after = users[0]
        operands = [arg for arg in reader.value.args if not any(arg.same_as(result) for result in item.results)]
        if after.group != item.group or after.shape != item.shape or len(operands) != 1:
            return False
        if not same_shape(shape_of(operands[0]) or (), item.shape):
            return False
        plan = self._plans[id(after)]
        plan.reduce = replace(plan.reduce, has_residual=True)
        plan.parts = [operands[0] if part.same_as(reader.var) else part for part in after.parts]
        plan.residuals = self._plans[id(item)].rows = self._new_rows(item, plan.reduce)
        self._replaced.add(reader.var)
        return True

    def _new_rows(self, item: Sum, reduce: AllReduce) -> list[relax.Var]:
        """Variables of the rows of a long sum that each GPU keeps."""
        return [
            self._writer.new_local(f"{result.name}_rows", _tensor(reduce.sum_shape, "float32", result))
            for result in item.results
        ]

    def _row_takes(self, item: Sum) -> list[relax.VarBinding]:
        """Bindings that take rows of the operand of each GPU, so that their sum is that of the results' rows.

        Only after the sum are the rows there that replace them.
        """
        users = [self._users.get(part, []) for part in item.parts if isinstance(part, relax.Var)]
        takes = [[user for user in each if not isinstance(user, Sum) and _is_row_take(user)] for each in users]
        are_single = len(takes) == len(item.parts) and all(len(each) == 1 for each in takes)
        are_later = are_single and all(self._order[take.var] > self._order[item.results[0]] for (take,) in takes)
        return [take for (take,) in takes] if are_later else []

    def _join_copies(self, item: Sum) -> None:
        """Make an operand that all GPUs have, and that the first one adds to its part, the residual of a long sum."""
        plan, part, at = self._plans[id(item)], item.parts[0], self._order[item.results[0]]
        value = self._values.get(part)
        if plan.reduce.is_short or not plan.norms or plan.residuals or value is None or op_name(value) != "relax.add":
            return
        if len(self._users[part]) > 1 or part in self._outputs:
            return
        for residual, other in (value.args, value.args[::-1]):
            copies = self._copies.get(residual, {})
            copies = {device: copy for device, copy in copies.items() if self._order.get(copy, -1) < at}
            is_alike = all(same_shape(shape_of(operand) or (), item.shape) for operand in (residual, other))
            if is_alike and copies.keys() >= {*item.group}:
                plan.reduce = replace(plan.reduce, has_residual=True, is_residual_whole=True)
                plan.parts[0], plan.residuals = other, [copies[device] for device in item.group]
                self._replaced.add(part)
                return

    def _other_users(self, result: relax.Var, norm: _Norm) -> list[relax.VarBinding | Sum]:
        inside = {binding.var for binding in norm.bindings}
        return [user for user in self._users.get(result, []) if isinstance(user, Sum) or user.var not in inside]

    def _norm_of(self, var: relax.Var) -> _Norm | None:
        """The norm of a variable over its last axis, with all of its bindings."""
        for user in self._users.get(var, []):
            if isinstance(user, Sum):
                continue
            pattern = self._from_op(var, user) or self._from_squares(var, user) or self._from_mean(var, user)
            if pattern is None:
                continue
            eps, weights, bindings = pattern
            row, dtypes = (shape_of(var) or [0])[-1:], {str(bindings[-1].var.ty.dtype)}
            are_rows = all(is_tensor_constant(each) and same_shape(shape_of(each) or (), row) for each in weights)
            if eps is None or not are_rows or dtypes.union(str(each.ty.dtype) for each in weights) != {"float32"}:
                continue
            narrow = self._sole_user(bindings[-1], "relax.astype")
            if narrow is not None and str(narrow.var.ty.dtype) == "float16":
                bindings.append(narrow)
            dtype = str(bindings[-1].var.ty.dtype)
            return _Norm(RowNorm(float(eps), dtype, is_centered=len(weights) > 1), weights, bindings)
        return None

    def _from_op(self, var: relax.Var, user: relax.VarBinding) -> _NormPattern | None:
        call, rank = user.value, len(shape_of(var) or [])
        name = op_name(call)
        if name not in ("relax.nn.rms_norm", "relax.nn.layer_norm") or not call.args[0].same_as(var):
            return None
        if [int(axis) % rank for axis in call.attrs.axes] != [rank - 1]:
            return None
        if name == "relax.nn.layer_norm" and not (call.attrs.center and call.attrs.scale):
            return None
        return float(call.attrs.epsilon), list(call.args[1:]), [user]

    def _from_squares(self, var: relax.Var, squares: relax.VarBinding) -> _NormPattern | None:
        scaled = self._scaled(var, squares)
        if scaled is None:
            return None
        eps, bindings = scaled
        result = self._sole_user(bindings[-1], "relax.multiply")
        return None if result is None else (eps, [_other(result, bindings[-1].var)], [*bindings, result])

    def _from_mean(self, var: relax.Var, mean: relax.VarBinding) -> _NormPattern | None:
        """A layer norm of several ops, as exporters write it."""
        centered = self._sole_user(mean, "relax.subtract") if _is_row_mean(mean, var) else None
        if centered is None or not centered.value.args[0].same_as(var) or centered.var in self._outputs:
            return None
        users = self._users.get(centered.var, [])
        for squares in users:
            scaled = None if isinstance(squares, Sum) else self._scaled(centered.var, squares)
            if scaled is None:
                continue
            eps, bindings = scaled
            weighted = self._sole_user(bindings[-1], "relax.multiply")
            result = self._sole_user(weighted, "relax.add")
            if weighted is not None and result is not None and len(users) == 2:
                weights = [_other(weighted, bindings[-1].var), _other(result, weighted.var)]
                return eps, weights, [mean, centered, *bindings, weighted, result]
        return None

    def _scaled(self, var: relax.Var, squares: relax.VarBinding) -> tuple[float | None, list[relax.VarBinding]] | None:
        """Epsilon and bindings of a variable divided by the root of the mean of its squares."""
        value = squares.value
        is_product = op_name(value) == "relax.multiply" and all(arg.same_as(var) for arg in value.args)
        is_power = op_name(value) == "relax.power" and value.args[0].same_as(var) and scalar_of(value.args[1]) == 2.0
        mean = self._sole_user(squares, "relax.mean") if is_product or is_power else None
        shifted = self._sole_user(mean, "relax.add")
        root = self._sole_user(shifted, "relax.rsqrt")
        normal = self._sole_user(root, "relax.multiply")
        if root is None:
            root = self._sole_user(shifted, "relax.sqrt")
            normal = self._sole_user(root, "relax.divide")
        if mean is None or shifted is None or root is None or normal is None or not _is_row_mean(mean, squares.var):
            return None
        if not normal.value.args[0].same_as(var) and op_name(normal.value) == "relax.divide":
            return None
        if not _other(normal, root.var).same_as(var):
            return None
        return scalar_of(_other(shifted, mean.var)), [squares, mean, shifted, root, normal]

    def _sole_user(self, binding: relax.VarBinding | None, name: str) -> relax.VarBinding | None:
        """The only use of a variable, if it is a call of an op."""
        users = self._users.get(binding.var, []) if binding is not None else []
        if binding is None or len(users) != 1 or binding.var in self._outputs or isinstance(users[0], Sum):
            return None
        return users[0] if op_name(users[0].value) == name else None

    # -- bindings and kernels

    def keep(self, binding: relax.VarBinding) -> None:
        """Write a binding of the function, unless kernels replace it."""
        if binding.var in self._taken:
            self._take(binding, self._taken[binding.var])
        elif binding.var not in self._replaced:
            self._writer.keep(binding)

    def _take(self, binding: relax.VarBinding, taken: _TakenRow) -> None:
        """Write a row of a long sum as a part of a GPU."""
        index = binding.value.args[1]
        kernel = self._writer.add_kernel(_kept_rows_kernel(taken, index), "kept_rows")
        call = relax.op.call_tir(kernel, relax.Tuple([taken.rows, index]), binding.var.ty)
        self._writer.add_binding(binding.var, call)

    def add(self, item: Sum) -> None:
        """Add the kernels of a sum, one for each device."""
        plan = self._plans[id(item)]
        if self._is_alone[item.group]:
            first = [self._writer.new_local(f"{var.name}_first", var.ty) for var in item.results]
            self._add_pass(item, _Plan(AllReduce(item.shape, len(item.group)), plan.parts), first)
        self._add_pass(item, plan, item.results)

    def _add_pass(self, item: Sum, plan: _Plan, results: Sequence[relax.Var]) -> None:
        slot, reduce = next(self._slots[item.group]), plan.reduce
        for rank, (device, part) in enumerate(zip(item.group, plan.parts, strict=True)):
            after = self._last.get(device, part)
            keeps_sum = bool(plan.norms) and plan.keeps_sum[rank]
            kernel = all_reduce_kernel(reduce, rank, slot, self._slot_bytes, static_form(after), keeps_sum)
            function = self._writer.add_kernel(opaque_kernel(kernel), f"all_reduce_{rank}_of_{reduce.ranks}")
            operands = [part, self._addresses[item.group, device], after]
            operands += [plan.residuals[rank]] if plan.residuals else []
            operands += plan.norms[rank].weights if plan.norms else []
            out = plan.norms[rank].result if plan.norms else results[rank]
            outputs = [out, plan.rows[rank] if plan.rows else results[rank]] if keeps_sum else [out]
            types = [var.ty for var in outputs]
            call = relax.op.call_tir(function, relax.Tuple(operands), types if keeps_sum else out.ty)
            if keeps_sum:
                both = self._writer.new_local(f"{results[rank].name}_and_norm", tvm.ir.TupleType(types))
                self._writer.add_binding(both, call)
                for index, var in enumerate(outputs):
                    self._writer.add_binding(var, relax.TupleGetItem(both, index))
            else:
                self._writer.add_binding(out, call)
            self._last[device] = out

    def _new_addresses(self, group: Group, device: int) -> relax.Var:
        """Addresses of the memory that the GPUs of a mesh write to."""
        numbers = [relax.prim_value(number) for number in (device, self._slot_bytes, *group)]
        return self._writer.new_addresses(PEER_MEMORY, numbers, len(group), device)


def _users_of(items: Sequence[relax.VarBinding | Sum]) -> Mapping[relax.Var, list[relax.VarBinding | Sum]]:
    users: dict[relax.Var, list[relax.VarBinding | Sum]] = {}
    for item in items:
        values = item.parts if isinstance(item, Sum) else [item.value]
        for var in {var for value in values for var in used_vars(value)}:
            users.setdefault(var, []).append(item)
    return users


def _other(binding: relax.VarBinding, operand: relax.Var) -> relax.Expr:
    """The other operand of a call of two."""
    first, second = binding.value.args
    return second if first.same_as(operand) else first


def _kept_rows_kernel(taken: _TakenRow, index: relax.Expr) -> tirx.PrimFunc:
    """Kernel of the rows of a long sum with some indices, zeros in the place of those of other GPUs."""
    count, width = (int(extent) for extent in taken.rows.ty.shape.values)
    rows = te.placeholder((count, width), "float32", "rows")
    indices = te.placeholder(index.ty.shape.values, str(index.ty.dtype), "indices")

    def row(i: tirx.Var, j: tirx.Var) -> tvm.ir.Expr:
        own = tirx.max(tirx.min(indices[i], taken.total - 1), 0) - taken.rank * count
        kept = rows[tirx.max(tirx.min(own, count - 1), 0), j]
        return tirx.Select(tirx.all(own >= 0, own < count), kept, tirx.const(0.0, "float32"))

    return te.create_prim_func([rows, indices, te.compute((indices.shape[0], width), row, "kept_rows")])


def _is_row_take(binding: relax.VarBinding) -> bool:
    """Return whether a value is rows of a matrix of float32, by a vector of indices of known length."""
    value = binding.value
    if op_name(value) != "relax.take" or value.attrs.axis is None or str(value.attrs.mode) != "clip":
        return False
    is_matrix = len(shape_of(value.args[0]) or []) == 2 and str(value.ty.dtype) == "float32"
    indices = shape_of(value.args[1]) or []
    return is_matrix and int(value.attrs.axis) == 0 and len(indices) == 1 and isinstance(indices[0], (int, tirx.IntImm))


def _is_row_mean(binding: relax.VarBinding, var: relax.Var) -> bool:
    """Return whether a value is the mean of a variable's rows."""
    if op_name(binding.value) != "relax.mean" or not binding.value.args[0].same_as(var):
        return False
    rank, attrs = len(shape_of(var) or []), binding.value.attrs
    return bool(attrs.keepdims) and [int(axis) % rank for axis in attrs.axis or range(rank)] == [rank - 1]


def _tensor(shape: Sequence[int], dtype: str, like: relax.Var) -> relax.TensorType:
    return relax.TensorType(list(shape), dtype, like.ty.vdevice)
