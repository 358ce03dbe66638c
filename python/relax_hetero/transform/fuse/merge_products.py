"""Merging of products of one tensor that only an attention reads: it reads slices of one product instead.

Before::

    q = R.add(R.matmul(x, wq), bq)                      # weights and biases are constants
    k = R.add(R.matmul(x, wk), bk)
    v = R.add(R.matmul(x, wv), bv)
    y = R.hetero.attention(q, k, v, heads="(b, m, h*d) * (b, n, g*d) * (b, n, g*e) -> ...")

After::

    qkv = R.add(R.matmul(x, concatenated weights), concatenated biases)
    y = R.hetero.attention(qkv, qkv, qkv, heads="(b, m, h*d) * (b, n, g*d+768) * (b, n, g*e+1536) -> ...")

One wide product has fewer partial panels and one dispatch to the other cores, and reads the left operand once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ...encoding.heads import Heads
from ...op.attention import ATTENTION
from ..ir.blocks import Block, Emitter, same_shape, shape_of, tensor_type
from ..ir.op_names import CAST
from ..ir.remarks import record_merged
from ..ir.rewriting import op_name, with_args


@dataclass
class _Product:
    """A product with a constant weight, and perhaps a constant bias, that only one attention reads."""

    var: relax.Var
    x: relax.Expr  # left operand
    weight: tvm.ir.GenericConst  # weight of shape (k, n)
    bias: tvm.ir.GenericConst | None  # bias of shape (n,)
    types: tuple[str, str]  # types of the product, and of the cast at its end
    inside: list[int]  # indices of its bindings


def merge_products(block: Block) -> list[relax.Binding] | None:
    """The block's bindings with products merged; None if there are none to merge."""
    merged: dict[int, list[_Product]] = {}
    for index, binding in enumerate(block.bindings):
        if op_name(binding.value) == ATTENTION:
            products = _mergeable(block, index, binding.value)
            if len(products) > 1:
                merged[index] = products
    if not merged:
        return None
    removed = {index for products in merged.values() for product in products for index in product.inside}
    emitter = Emitter(block.is_dataflow)
    for index, binding in enumerate(block.bindings):
        if index in merged:
            _write(emitter, binding, merged[index])
        elif index not in removed:
            emitter.bindings.append(binding)
    return emitter.bindings


def _mergeable(block: Block, index: int, call: relax.Call) -> list[_Product]:
    """Products among query, key and value with one left operand, all with a bias or all without."""
    products: list[_Product] = []
    for var in dict.fromkeys(call.args[:3]):
        product = _product(block, index, var) if isinstance(var, relax.Var) else None
        if product is not None and (var not in call.args[3:]):
            products.append(product)
    if not products:
        return []
    last = products[-1]
    return [
        product
        for product in products
        if product.x.same_as(last.x)
        and (product.bias is None) == (last.bias is None)
        and same_shape((shape_of(product.weight) or [])[:1], (shape_of(last.weight) or [])[:1])
        and str(product.weight.ty.dtype) == str(last.weight.ty.dtype)
        and product.types == last.types
    ]


def _product(block: Block, index: int, var: relax.Var) -> _Product | None:
    if block.sole_user(var) != index or var not in block.definitions:
        return None
    call, inside, bias = block.definitions[var], [block.positions[var]], None
    dtype = str(var.ty.dtype)
    if op_name(call) == CAST and isinstance(call.args[0], relax.Var):
        if block.sole_user(call.args[0]) != inside[0] or call.args[0] not in block.definitions:
            return None
        inside.insert(0, block.positions[call.args[0]])
        call = block.definitions[call.args[0]]
    if op_name(call) == "relax.add":
        product, bias = call.args if isinstance(call.args[1], tvm.ir.GenericConst) else reversed(call.args)
        if not isinstance(bias, tvm.ir.GenericConst) or len(shape_of(bias) or []) != 1:
            return None
        if (
            not isinstance(product, relax.Var)
            or block.sole_user(product) != inside[0]
            or product not in block.definitions
        ):
            return None
        call = block.definitions[product]
        inside.insert(0, block.positions[product])
    if op_name(call) != "relax.matmul" or not isinstance(call.args[1], tvm.ir.GenericConst):
        return None
    weight = call.args[1]
    shape = shape_of(weight) or []
    if len(shape) != 2 or len(shape_of(call.args[0]) or []) < 2 or not isinstance(call.args[0], relax.Var):
        return None
    if bias is not None and not same_shape(shape_of(bias) or [], shape[1:]):
        return None
    return _Product(var, call.args[0], weight, bias, (str(call.ty.dtype), dtype), inside)


def _write(emitter: Emitter, binding: relax.Binding, products: Sequence[_Product]) -> None:
    call, first = binding.value, products[0]
    starts, width = {}, 0
    for product in products:
        starts[product.var], width = width, width + int((shape_of(product.weight) or [])[1])
    name = f"{first.var.name}_merged"
    record_merged(name, [product.var.name for product in products])
    weight = _concatenated([product.weight for product in products], 1)
    shape = [*(shape_of(first.x) or [])[:-1], width]
    wide, narrow = (tensor_type(shape, dtype, first.var.ty) for dtype in first.types)
    is_cast = first.types[0] != first.types[1]
    # out_dtype is given only where it differs from the operands' type.
    out_dtype = None if str(first.x.ty.dtype) == first.types[0] else first.types[0]
    matmul = relax.op.matmul(first.x, weight, out_dtype=out_dtype)
    result = emitter.emit(matmul, wide, f"{name}_product" if first.bias is not None or is_cast else name)
    if first.bias is not None:
        bias = _concatenated([product.bias for product in products], 0)
        result = emitter.emit(relax.op.add(result, bias), wide, f"{name}_sum" if is_cast else name)
    if is_cast:
        result = emitter.emit(relax.op.astype(result, first.types[1]), narrow, name)
    heads = Heads.parse(call.attrs.heads)
    maps = [
        heads_map.shifted(starts[arg]) if arg in starts else heads_map
        for arg, heads_map in zip(call.args[:3], heads.operands, strict=True)
    ]
    args = [result if arg in starts else arg for arg in call.args]
    heads = replace(heads, query=maps[0], key=maps[1], value=maps[2])
    emitter.emit_as(binding.var, with_args(call, args, heads=str(heads)))


def _concatenated(constants: Sequence[Any], axis: int) -> tvm.ir.GenericConst:
    array = np.concatenate([constant.value.numpy() for constant in constants], axis)
    first_ty = constants[0].ty
    ty = relax.TensorType(list(array.shape), first_ty.dtype, first_ty.vdevice)
    return tvm.ir.GenericConst(tvm.runtime.tensor(np.ascontiguousarray(array)), ty)
