"""Elementwise work on the result of a product or convolution, as one expression on the encoded result.

A region starts at an `unset_encoding` and takes in users that are elementwise, as long as they are. It ends at the last
value through which every use of its start goes: in ``x * sigmoid(x)`` that is the product, not the sigmoid. What comes
before the end is computed nowhere else, so nothing is computed or stored twice. Where two products meet the later one
takes the work, and the earlier one's result is an operand of it. What a region takes in says `region_growth`.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from ...encoding.encoding import Encoding
from ...encoding.expression import Expression
from ...encoding.requantization import numbers_as_operands, simplify_requantization
from ...encoding.row_program import operands_of
from ...op import encoded as op
from ..ir.blocks import Block, Emitter, same_shape, shape_of, tensor_type, with_regions
from ..ir.constant_values import constant_near
from ..ir.rewriting import op_name
from .region_growth import Growth, Operand, Region


def absorb_elementwise(block: Block) -> list[relax.Binding] | None:
    """The block's bindings with every region one `R.hetero.elementwise`; None where there is none."""
    regions: dict[int, Region] = {}
    taken: set[int] = set()
    for binding in reversed(block.bindings):
        region = Growth(block, binding.var, taken).region() if is_root(binding, block) else None
        if region is not None:
            regions[region.end] = region
            taken.update([*region.inside, region.end])
    return with_regions(block, regions, lambda emitter, region, var: _write(emitter, region, var, block))


def is_root(binding: relax.Binding, block: Block) -> bool:
    """Whether a region may start here: at the plain form of what this block computed encoded."""
    value = binding.value
    if op_name(value) != op.UNSET or value.attrs.layout or shape_of(binding.var) is None:
        return False
    return op_name(block.definition(value.args[0])) in (*op.PRODUCTS, op.ELEMENTWISE)


def _write(emitter: Emitter, region: Region, var: relax.Var, block: Block) -> None:
    """The region's work, and its plain result as `var`."""
    unset = block.definitions[region.root]
    encoding = Encoding.parse(unset.attrs.encoding)
    expression, kept = _simplified(region)
    operands = [unset.args[0]]
    for number, operand in enumerate(kept, 1):
        value = _as_the_root(emitter, operand, f"{var.name}_x{number}")
        if operand.is_full:
            value = emitter.emit(op.set_encoding(value, encoding), value.ty, f"{var.name}_x{number}")
        operands.append(value)
    shape = shape_of(region.root) or []
    ty = tensor_type(shape, str(var.ty.dtype), region.root.ty)
    call = op.elementwise(*operands, expression=expression, encoding=encoding)
    result = emitter.emit(call, ty, f"{var.name}_encoded")
    if region.order is None and same_shape(shape, shape_of(var) or []):
        emitter.bind(var, relax.Call(unset.op, [result], unset.attrs, ret_ty=var.ty))
        return
    plain = emitter.emit(op.unset_encoding(result, encoding), ty, f"{var.name}_plain")
    if region.order is None:
        view = relax.op.reshape(plain, shape_of(var))
    else:
        view = relax.op.permute_dims(plain, list(region.order))
    emitter.bind(var, relax.Call(view.op, list(view.args), view.attrs, ret_ty=var.ty))


def _simplified(region: Region) -> tuple[Expression, list[Operand]]:
    """The region's expression with as few ops as requantizing takes, and the operands it still has after ``x0``."""
    values: list[relax.Expr] = [region.root, *(operand.value for operand in region.operands)]
    constants = {
        number: array for number, operand in enumerate(region.operands, 1) if (array := _constant(operand)) is not None
    }
    dtypes = [str(value.ty.dtype) for value in values]
    expression, made = simplify_requantization(region.expression, dtypes, constants)
    arrays = list(made.values())
    if expression != region.expression:
        expression, numbers = numbers_as_operands(expression, [*dtypes, *["float32"] * len(arrays)])
        arrays += numbers
    operands = [*region.operands, *(Operand(constant_near(array, region.root), None, False) for array in arrays)]
    used = [index for index in operands_of(expression) if index]
    places = [Expression.operand(used.index(i) + 1 if i in used else 0) for i in range(len(operands) + 1)]
    return expression.substitute(places), [operands[index - 1] for index in used]


def _constant(operand: Operand) -> np.ndarray | None:
    """The elements of a constant operand of float32 as it is met at the root; None for others."""
    if not isinstance(operand.value, tvm.ir.GenericConst) or str(operand.value.ty.dtype) != "float32":
        return None
    if operand.is_full:
        return None
    array = operand.value.value.numpy()
    if operand.axes is not None:
        return array.transpose(operand.axes)
    return array if operand.shape is None else array.reshape([int(extent) for extent in operand.shape])


def _as_the_root(emitter: Emitter, operand: Operand, name: str) -> relax.Expr:
    """An operand that was met behind a reshape or a permutation, as it has to be before that."""
    value, dtype = operand.value, str(operand.value.ty.dtype)
    if operand.axes is not None:
        shape = shape_of(value) or []
        ty = tensor_type([shape[axis] for axis in operand.axes], dtype, value.ty)
        return emitter.emit(relax.op.permute_dims(value, list(operand.axes)), ty, f"{name}_permuted")
    if operand.shape is not None and not same_shape(operand.shape, shape_of(value) or []):
        ty = tensor_type(operand.shape, dtype, value.ty)
        return emitter.emit(relax.op.reshape(value, list(operand.shape)), ty, f"{name}_reshaped")
    return value
