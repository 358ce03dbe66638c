"""Absorption of permutations around matrix products into the index maps of their encodings.

``set(permute_dims(x))`` becomes ``set(x)`` with an index map in the order of x's dimensions: an (n, k) weight is packed
as it is, and the heads of an attention, (b0, m, b1, k), are read in place. ``permute_dims(unset(y))`` becomes the unset
of a result that is written in the permuted order, if its innermost dimension stays innermost.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax

from ...encoding.encoding import LHS, RESULT, RHS, Encoding, IndexMap
from ...op import encoded as op
from ..ir.axes import permutation
from ..ir.blocks import Block, is_one, renamed, shape_of, tensor_type
from ..ir.op_names import PERMUTE, TRANSFER
from ..ir.rewriting import op_name, with_args
from .encoded_products import ProductWriter


@dataclass(frozen=True)
class Change:
    """New form of one matrix product."""

    encoding: Encoding  # encoding of the result, with the new index maps
    operands: tuple[relax.Expr, relax.Expr]  # plain left and right operand, without their permutations
    # Indices of other bindings with the encoding: elementwise, unset_encoding, set_encoding of their operands.
    chain: tuple[int, ...]
    permuted: tuple[int, ...] | None  # permutation of the result that is absorbed, if any
    permute: int  # index of the binding of that permutation


def absorb_permutes(block: Block) -> list[relax.Binding] | None:
    """The block's bindings without permutations that encodings can express; None if there are none."""
    products: dict[int, Change] = {}
    followers: dict[int, Change] = {}
    for index, binding in enumerate(block.bindings):
        change = _change(block, binding, followers) if op_name(binding.value) == op.MATMUL else None
        if change is not None:
            products[index] = change
            followers.update(dict.fromkeys(change.chain, change))
            if change.permuted is not None:
                followers[change.permute] = change
    if not products:
        return None
    writer = ProductWriter(block.is_dataflow)
    names: dict[relax.Var, relax.Expr] = {}
    for index, old in enumerate(block.bindings):
        binding = renamed(old, names)
        if index in products:
            _write_product(writer, products[index], binding, names)
        elif index in followers:
            _write_follower(writer, followers[index], index, binding, names)
        else:
            writer.bindings.append(binding)
    return writer.bindings


def _change(block: Block, binding: relax.Binding, earlier: Container[int]) -> Change | None:
    """The change of a product; permutations at `earlier` indices are absorbed by the product before them."""
    call = binding.value
    encoding = Encoding.parse(call.attrs.encoding)
    if call.attrs.layout or len(call.args) > 2 and not _is_plain(block, call.args[2]):
        return None
    chain = _chain(block, binding.var, call.attrs.encoding)
    if chain is None:
        return None
    operands, maps = [], list(encoding.index_maps)
    for index in (LHS, RHS):
        encoded = block.definition(call.args[index])
        if op_name(encoded) != op.SET or encoded.attrs.layout:
            return None
        operand = encoded.args[0]
        while op_name(block.definition(operand)) == PERMUTE and block.positions.get(operand) not in earlier:
            permute = block.definition(operand)
            maps[index] = _map_before(maps[index], permutation(permute))
            operand = permute.args[0]
        operands.append(operand)
    axes, permute_index = _permuted_result(block, encoding, call, chain)
    if axes is not None:
        maps[RESULT] = tuple(encoding.index_map[axis] for axis in axes)
    if tuple(maps) == encoding.index_maps:
        return None
    new = replace(encoding, index_maps=(maps[LHS], maps[RHS], maps[RESULT]))
    return Change(new, (operands[0], operands[1]), chain, axes, permute_index)


def _map_before(index_map: IndexMap, axes: Sequence[int]) -> IndexMap:
    """The index map of x, given the `index_map` of ``permute_dims(x, axes)``."""
    names = dict(zip(axes, index_map, strict=True))
    return tuple(names[axis] for axis in range(len(axes)))


def _is_plain(block: Block, operand: relax.Expr) -> bool:
    name = op_name(block.definition(operand))
    return name not in (op.SET, op.MATMUL, op.ELEMENTWISE, op.PREPACKED, op.RELAYOUT, TRANSFER)


def _chain(block: Block, var: relax.Var, encoding: str) -> tuple[int, ...] | None:
    """Indices of all bindings with the encoding of product `var`; None if one of them requires this encoding."""
    chain: list[int] = []
    pending = [var]
    while pending:
        encoded = pending.pop()
        if not block.is_local(encoded):
            return None
        for index in block.users.get(encoded, []):
            value, name = block.bindings[index].value, op_name(block.bindings[index].value)
            if name not in (op.UNSET, op.ELEMENTWISE) or value.attrs.layout or not value.args[0].same_as(encoded):
                return None
            chain.append(index)
            if name == op.ELEMENTWISE:
                operands = _encoded_operands(block, index, encoding)
                if operands is None:
                    return None
                chain += operands
                pending.append(block.bindings[index].var)
    return tuple(chain)


def _encoded_operands(block: Block, index: int, encoding: str) -> list[int] | None:
    """Indices of the set_encoding of an elementwise op's operands; None if one has other users or another encoding."""
    indices = []
    for operand in block.bindings[index].value.args[1:]:
        if _is_plain(block, operand):
            continue
        definition = block.definition(operand)
        if op_name(definition) != op.SET or definition.attrs.encoding != encoding or block.sole_user(operand) != index:
            return None
        indices.append(block.positions[operand])
    return indices


def _permuted_result(
    block: Block, encoding: Encoding, product: relax.Call, chain: Sequence[int]
) -> tuple[tuple[int, ...] | None, int]:
    """The axes of the permutation that is the only user of the result, and the index of its binding."""
    unsets = [index for index in chain if op_name(block.bindings[index].value) == op.UNSET]
    user = block.sole_user(block.bindings[unsets[0]].var) if len(unsets) == 1 else None
    if user is None or op_name(block.bindings[user].value) != PERMUTE:
        return None, -1
    permute = block.bindings[user]
    users = [op_name(block.bindings[index].value) for index in block.users.get(permute.var, [])]
    if block.is_local(permute.var) and set(users) == {op.SET}:
        return None, -1  # the product that reads it absorbs the permutation
    axes = permutation(permute.value)
    operands = [*product.args[2:], *(arg for index in chain for arg in block.bindings[index].value.args[1:])]
    stays_innermost = encoding.index_map[axes[-1]] == encoding.index_map[-1] == "n"
    if not stays_innermost or not all(_varies_only_along_last(operand) for operand in operands):
        return None, -1
    return tuple(axes), user


def _varies_only_along_last(operand: relax.Expr) -> bool:
    shape = shape_of(operand)
    return shape is not None and all(is_one(extent) for extent in shape[:-1])


def _write_product(
    writer: ProductWriter, change: Change, binding: relax.VarBinding, names: dict[relax.Var, relax.Expr]
) -> None:
    call, var = binding.value, binding.var
    operands = [
        names.get(operand, operand) if isinstance(operand, relax.Var) else operand for operand in change.operands
    ]
    encoded = [
        writer.encode(x, change.encoding.of(index), var.name.removesuffix("_encoded"))
        for index, x in enumerate(operands)
    ]
    product = with_args(call, [*encoded, *call.args[2:]], encoding=str(change.encoding), layout="")
    _write_result(writer, change, binding, product, names)


def _write_result(
    writer: ProductWriter, change: Change, binding: relax.VarBinding, call: relax.Call, names: dict[relax.Var, Any]
) -> None:
    var = binding.var
    if change.permuted is None:
        writer.emit_as(var, call)
        return
    shape = shape_of(var)
    ty = var.ty
    if shape is not None:
        ty = tensor_type([shape[axis] for axis in change.permuted], str(ty.dtype), ty)
    names[var] = writer.emit(call, ty, var.name)


def _write_follower(
    writer: ProductWriter,
    change: Change,
    index: int,
    binding: relax.VarBinding,
    names: dict[relax.Var, relax.Expr],
) -> None:
    call, var = binding.value, binding.var
    if change.permuted is not None and op_name(call) == op.UNSET:
        names[var] = call.args[0]  # the binding of the permutation becomes the unset
    elif index == change.permute and change.permuted is not None:
        writer.emit_as(var, op.unset_encoding(call.args[0], change.encoding))
    else:
        encoded = with_args(call, call.args, encoding=str(change.encoding), layout="")
        if op_name(call) == op.ELEMENTWISE:
            _write_result(writer, change, binding, encoded, names)
        else:
            writer.emit_as(var, encoded)
