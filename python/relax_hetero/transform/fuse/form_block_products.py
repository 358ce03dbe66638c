"""FormBlockProducts: products with weights of 4 or 8 bits become one op where the device has a kernel for it.

Before::

    w = R.hetero.dequantize_blocks(data, scales, depth=4096, block=32)     # constants
    y = R.add(R.matmul(x, R.permute_dims(w, axes=[1, 0])), bias)

After::

    y = R.hetero.block_matmul(x, packed, packed_scales, bias, columns=4096, block=32, expression="add(x0, x1)")

The constants are packed as the device's kernel reads them. Elementwise work of which each is the only user of the one
before becomes part of the op. Where there is no kernel, or the weights are no constants or used by something else,
what they mean is computed by plain ops: of constants by FormDispatches, of parameters in every call.

Assumes a placed module (RealizeVDevice). A second run changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from ...encoding.block_panels import BlockSource
from ...encoding.block_weights import BlockLayout
from ...encoding.expression import Expression, Term
from ...encoding.resolver import block_layout
from ...op.block_products import DEQUANTIZE_BLOCKS, block_matmul, form_of
from ..encode.epilogues import may_write
from ..ir.axes import permutation
from ..ir.blocks import (
    Block,
    Emitter,
    broadcast,
    is_one,
    rewrite_blocks,
    same_shape,
    shape_of,
    tensor_type,
    with_regions,
    without_unused,
)
from ..ir.declare import declare_pass
from ..ir.op_names import CAST, PERMUTE
from ..ir.relax_expressions import to_expression
from ..ir.rewriting import is_tensor_constant, op_name
from ..ir.targets import target_of
from .plain_blocks import write_plain

_MOST_OPS = 32
"""That a product takes along."""


@dataclass
class _Product:
    """A product with weights of 4 or 8 bits, and the elementwise work behind it.

    Attributes
    ----------
    lhs : relax.Expr
    weight : relax.Call
        Of dequantize_blocks.
    layout : BlockLayout
        How the device's kernel reads the weight.
    inside : list of int
        Indices of the bindings before the last one.
    end : int
    expression : Expression
    operands : list of relax.Expr
        ``x1``, ``x2``, ...
    """

    lhs: relax.Expr
    weight: relax.Call
    layout: BlockLayout
    inside: list[int]
    end: int
    expression: Expression
    operands: list[relax.Expr] = field(default_factory=list)


def form_block_products(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    packer = _Packer()
    return rewrite_blocks(mod, lambda block: _form(block, packer))


FormBlockProducts = declare_pass("FormBlockProducts", form_block_products)


def _form(block: Block, packer: _Packer) -> list[relax.Binding] | None:
    if not any(op_name(binding.value) == DEQUANTIZE_BLOCKS for binding in block.bindings):
        return None
    products: dict[int, _Product] = {}
    taken: set[int] = set()
    for index in reversed(range(len(block.bindings))):
        product = _product_at(block, index)
        if product is not None and index not in taken:
            _take_elementwise(block, product, taken)
            products[product.end] = product
            taken.update([*product.inside, product.end])
    formed = with_regions(block, products, lambda emitter, product, var: _write(emitter, product, var, packer))
    kept = without_unused(formed or block.bindings, block, _is_weight)
    emitter = Emitter(block.is_dataflow)
    for binding in kept:
        if op_name(binding.value) == DEQUANTIZE_BLOCKS:
            write_plain(emitter, _with_definitions(block, binding.value), binding.var)
        else:
            emitter.bindings.append(binding)
    return emitter.bindings


def _is_weight(value: relax.Expr) -> bool:
    return op_name(value) in (DEQUANTIZE_BLOCKS, PERMUTE, CAST)


def _product_at(block: Block, index: int) -> _Product | None:
    """The product of a binding, None where it is none with such weights, or the device has no kernel for it."""
    binding = block.bindings[index]
    if op_name(binding.value) != "relax.matmul" or shape_of(binding.var) is None:
        return None
    lhs, rhs = binding.value.args
    if len(shape_of(rhs) or []) != 2:  # of several heads, as in attention
        return None
    weight = block.definition(rhs)
    order = [0, 1]
    while op_name(weight) in (PERMUTE, CAST):
        if op_name(weight) == PERMUTE:
            order = [order[axis] for axis in permutation(weight)]
        elif "float" not in str(weight.ty.dtype):
            return None
        weight = block.definition(weight.args[0])
    if op_name(weight) != DEQUANTIZE_BLOCKS or order != [1, 0] or len(shape_of(lhs) or []) < 2:
        return None
    is_known = all(is_tensor_constant(block.definition(arg)) for arg in weight.args)
    dtypes = (str(lhs.ty.dtype), str(binding.var.ty.dtype))
    layout = block_layout(target_of(binding.var.ty.vdevice))
    if not is_known or "float64" in dtypes or layout is None or not _fits(layout, weight):
        return None
    if op_name(block.definition(lhs)) == CAST and str(block.definition(lhs).args[0].ty.dtype) in layout.lhs_types:
        # Its numbers are the same as before the cast to a wider type.
        narrow = block.definition(lhs).args[0]
        lhs = narrow if dtypes[0] == "float32" else lhs
    weight = _with_definitions(block, weight)
    sums = Expression.operand(0)
    if dtypes[1] != "float32":
        sums = Expression(Term("cast", (sums.term,), (dtypes[1],)))
    return _Product(lhs, weight, layout, [], index, sums)


def _fits(layout: BlockLayout, weight: relax.Call) -> bool:
    return layout.fits(form_of(weight), int(weight.attrs.depth))


def _with_definitions(block: Block, weight: relax.Call) -> relax.Call:
    """A call of dequantize_blocks that names constants in the place of variables that are bound to them."""
    return relax.Call(weight.op, [block.definition(arg) for arg in weight.args], weight.attrs, ret_ty=weight.ty)


def _take_elementwise(block: Block, product: _Product, taken: set[int]) -> None:
    """Take along elementwise work, as long as each op is the only user of the one before."""
    for _ in range(_MOST_OPS):
        last = block.bindings[product.end].var
        index = block.sole_user(last)
        if index is None or index in taken or any(may_write(b.value) for b in block.bindings[product.end + 1 : index]):
            return
        binding = block.bindings[index]
        found = to_expression(binding.value) if isinstance(binding, relax.VarBinding) else None
        if found is None or not same_shape(shape_of(binding.var) or [], shape_of(last) or []):
            return
        expression, tensors = found
        operands = list(product.operands)
        terms = []
        for tensor in tensors:
            if tensor.same_as(last):
                terms.append(product.expression)
                continue
            if not _is_readable(tensor, last):
                return
            known = next((i for i, other in enumerate(operands) if other.same_as(tensor)), len(operands))
            operands[known:] = operands[known:] or [tensor]
            terms.append(Expression.operand(1 + known))
        product.expression, product.operands = expression.substitute(terms), operands
        product.inside.append(product.end)
        product.end = index


def _is_readable(tensor: relax.Expr, result: relax.Var) -> bool:
    """Whether an operand has the result's shape, or one number for a column or for all."""
    shape, whole = shape_of(tensor), shape_of(result) or []
    if shape is None:
        return False
    return same_shape(shape, whole) or (
        all(map(is_one, shape[:-1])) and same_shape(broadcast(shape[-1:], whole[-1:]) or [], whole[-1:])
    )


def _write(emitter: Emitter, product: _Product, var: relax.Var, packer: _Packer) -> None:
    lhs = product.lhs
    if str(lhs.ty.dtype) not in product.layout.lhs_types:
        ty = tensor_type(shape_of(lhs) or [], "float32", lhs.ty)
        lhs = emitter.emit(relax.op.astype(lhs, "float32"), ty, f"{var.name}_lhs")
    operands = []
    for number, operand in enumerate(product.operands, 1):
        shape = shape_of(operand) or []
        if len(shape) > 1 and not same_shape(shape, shape_of(var) or []):
            ty = tensor_type(shape[-1:], str(operand.ty.dtype), operand.ty)
            operand = emitter.emit(relax.op.reshape(operand, shape[-1:]), ty, f"{var.name}_x{number}")
        operands.append(operand)
    weights = packer.pack(product, var.ty.vdevice)
    call = block_matmul(
        lhs,
        *weights,
        *operands,
        columns=int(product.weight.ty.shape.values[0]),
        block=int(product.weight.attrs.block),
        bits=int(product.weight.attrs.bits),
        zeros=len(product.weight.args) > 2,
        expression=product.expression,
        format=str(product.weight.attrs.format),
    )
    emitter.bind(var, relax.Call(call.op, list(call.args), call.attrs, ret_ty=var.ty))


class _Packer:
    """The weights packed so far, of which there is one for each operands of dequantize_blocks and layout."""

    def __init__(self) -> None:
        self._packed: dict[tuple[Any, ...], list[tvm.runtime.Tensor]] = {}

    def pack(self, product: _Product, vdevice: relax.VDevice | None) -> list[relax.Expr]:
        """The operands of a call of dequantize_blocks as the kernel of a device reads them."""
        weight = product.weight
        form, depth = form_of(weight), int(weight.attrs.depth)
        # The module keeps the constants alive, so their identities will do.
        key = (*(hash(arg.value) for arg in weight.args), form, depth, product.layout)
        if key not in self._packed:
            source = BlockSource(tuple(arg.value.numpy() for arg in weight.args), form, depth)
            self._packed[key] = [tvm.runtime.tensor(array) for array in product.layout.pack(source)]
        return [
            tvm.ir.GenericConst(data, relax.TensorType(list(data.shape), str(data.dtype), vdevice))
            for data in self._packed[key]
        ]
