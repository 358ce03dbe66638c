"""Products with block-quantized weights as FormQuantizedMatmuls gathers them, and what joins those of few rows.

On GPUs each launch of a decode step counts: products of experts take biases, roundings, weighted sums and the other
factor of a gated network into their kernel. Products of many rows have kernels without these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import tvm
from tvm import relax

from ...encoding.block_weights import MAX_FUSED_PAIRS, MAX_SUMMED_EXPERTS, BlockLayout, Fragments
from ...encoding.expression import Expression
from ...op.quantized_matmul import form_of
from ...vm.device.tensor_arrays import host_array
from ..encode.epilogues import may_write
from ..ir.blocks import Block, is_one, same_shape, shape_of
from ..ir.op_names import CAST, RESHAPE
from ..ir.relax_expressions import to_expression
from ..ir.rewriting import is_tensor_constant, op_name

_MAX_JOINED_OPS = 8  # maximum number of elementwise ops whose values join in one


@dataclass
class Product:
    """A product with block-quantized weights, and the elementwise ops after it."""

    lhs: relax.Expr
    weight: relax.Call  # call of dequantize_blocks
    layout: BlockLayout  # layout in which the device's kernel reads the weight
    inside: list[int]  # indices of the bindings before the last one
    end: int
    expression: Expression
    operands: list[relax.Expr] = field(default_factory=list)  # operands ``x1``, ``x2``, ..
    experts: int = 0  # number of matrices of the weight; 0: one for all rows
    index: relax.Expr | None = None  # indices of the experts that each row is multiplied by
    # Call of dequantize_blocks of a second product of the same rows, whose sum is ``x1``; operands are ``x2``, ...
    second: relax.Call | None = None
    shares: relax.Expr | None = None  # shares of the rows in the result, which is their sum
    # Biases of experts, (experts, columns), which are added to the sum of each product.
    biases: list[relax.Expr] = field(default_factory=list)
    rounded: str = ""  # type that `lhs`, a row of float32 for each token, is rounded to; empty for its own
    source: relax.Expr | None = None  # weight on the CPU that keeps it, for copies in each call

    @property
    def columns(self) -> int:
        """Number of columns of one matrix."""
        return int(self.weight.ty.shape.values[0]) // max(1, self.experts)


def has_writes(block: Block, first: int, last: int) -> bool:
    """Return whether a binding between two may write to what another reads."""
    return any(may_write(binding.value) for binding in block.bindings[first + 1 : last])


def fuse_joined(block: Block, product: Product, claimed: set[int]) -> bool:
    """Fuse elementwise ops that read a result more than once and whose values join in one; returns whether they do."""
    last = block.bindings[product.end].var
    values, inside = {last: product.expression}, [product.end]
    for _ in range(_MAX_JOINED_OPS):
        users = {index for var in values for index in block.users.get(var, [])} - set(inside)
        if not users or not all(map(block.is_local, values)):
            return False
        index = min(users)
        binding = block.bindings[index]
        parsed = to_expression(binding.value) if isinstance(binding, relax.VarBinding) else None
        if parsed is None or index in claimed or has_writes(block, product.end, index):
            return False
        if not same_shape(shape_of(binding.var) or [], shape_of(last) or []):
            return False
        expression, tensors = parsed
        if not all(tensor in values for tensor in tensors):
            return False
        values[binding.var] = expression.substitute([values[tensor] for tensor in tensors])
        if users == {index}:
            product.expression = values[binding.var]
            product.inside += inside
            product.end = index
            return True
        inside.append(index)
    return False


def has_few_rows(product: Product) -> bool:
    """Return whether a product's rows have kernels of two products and of weighted sums."""
    extents = [] if product.index is None else shape_of(product.index) or []
    if not (extents and isinstance(product.layout, Fragments) and all(map(_is_number, extents))):
        return False
    return prod(map(int, extents)) <= MAX_FUSED_PAIRS and int(extents[1]) <= MAX_SUMMED_EXPERTS


def _is_number(extent: Any) -> bool:
    return isinstance(extent, int | tvm.tirx.IntImm)


def fuse_bias(block: Block, product: Product, claimed: set[int]) -> None:
    """Fuse the addition of the biases of the rows' experts into a product."""
    last = block.bindings[product.end].var
    index = block.sole_user(last)
    if index is None or index in claimed or has_writes(block, product.end, index):
        return
    if op_name(block.bindings[index].value) != "relax.add":
        return
    first, second = block.bindings[index].value.args
    rows = block.definition(second if first.same_as(last) else first)
    taken = block.definition(rows.args[0]) if op_name(rows) == RESHAPE else None
    if taken is None or op_name(taken) != "relax.take" or not taken.args[1].same_as(product.index):
        return
    biases, axis = taken.args[0], taken.attrs.axis
    fits = axis is not None and int(axis) == 0 and same_shape(shape_of(rows) or [], shape_of(last) or [])
    if fits and same_shape(shape_of(biases) or [], [product.experts, product.columns]) and _is_float32(biases):
        product.biases = [biases]
        product.inside.append(product.end)
        product.end = index


def _is_float32(tensor: relax.Expr) -> bool:
    return str(tensor.ty.dtype) == "float32"


def fuse_shares(block: Block, product: Product, claimed: set[int]) -> bool:
    """Fuse the weighted sum of a token's rows into a product of experts; returns whether there is one.

    Rows of negative indices may be left out of the sum.
    """
    if product.expression != Expression.operand(0):
        return False
    chain = [product.end]
    for name in (RESHAPE, "relax.multiply", "relax.where", "relax.sum"):
        index = block.sole_user(block.bindings[chain[-1]].var)
        if name == "relax.where" and index is not None and op_name(block.bindings[index].value) != name:
            continue
        if index is None or index in claimed or op_name(block.bindings[index].value) != name:
            return False
        chain.append(index)
    if has_writes(block, chain[0], chain[-1]):
        return False
    rows, weighted, *masked, total = (block.bindings[index].value for index in chain[1:])
    if any(not _leaves_out_negative(block, value, product.index) for value in masked):
        return False
    tokens, used, _, columns = shape_of(block.bindings[product.end].var) or []
    first, second = weighted.args
    column = second if first.same_as(block.bindings[chain[1]].var) else first
    shares = block.definition(column)
    if not (
        same_shape(shape_of(rows) or [], [tokens, used, columns])
        and [int(axis) for axis in total.attrs.axis or []] == [1]
        and op_name(shares) == RESHAPE
        and same_shape(shape_of(column) or [], [tokens, used, 1])
        and same_shape(shape_of(shares.args[0]) or [], [tokens, used])
        and not total.attrs.keepdims
        and _is_float32(column)
    ):
        return False
    product.shares = shares.args[0]
    product.inside += chain[:-1]
    product.end = chain[-1]
    return True


def _leaves_out_negative(block: Block, where: relax.Call, index: relax.Expr | None) -> bool:
    """Return whether an op puts 0 for the rows whose index is negative, and nothing else."""
    mask, _, other = where.args
    expanded = block.definition(mask)
    condition = block.definition(expanded.args[0]) if op_name(expanded) == "relax.expand_dims" else None
    return condition is not None and (
        op_name(condition) == "relax.greater_equal"
        and [int(axis) for axis in expanded.attrs.axis] == [2]
        and index is not None
        and condition.args[0].same_as(index)
        and _is_zero(block.definition(condition.args[1]))
        and _is_zero(block.definition(other))
    )


def _is_zero(value: relax.Expr) -> bool:
    return is_tensor_constant(value) and not host_array(value.value).any()


def fuse_factor(block: Block, product: Product, products: dict[int, Product]) -> None:
    """Fuse a product of the same rows, whose result only `product` reads, into it as the first of two."""
    if not has_few_rows(product) or product.second is not None or product.shares is not None:
        return
    own = {*product.inside, product.end}
    ends = {block.bindings[each.end].var: each for each in products.values()}
    factors = [
        (number, ends[operand])
        for number, operand in enumerate(product.operands)
        if operand in ends
        and _are_factors(ends[operand], product)
        and block.sole_user(operand) in own
        and not has_writes(block, ends[operand].end, product.end)
    ]
    if not factors:
        return
    number, first = factors[0]
    count = len(first.operands)
    of_first = [Expression.operand(0), *(Expression.operand(2 + i) for i in range(count))]
    others = [Expression.operand(2 + count + i - (i > number)) for i in range(len(product.operands))]
    others[number] = first.expression.substitute(of_first)
    product.expression = product.expression.substitute([Expression.operand(1), *others])
    product.operands = [*first.operands, *(x for i, x in enumerate(product.operands) if i != number)]
    product.weight, product.second = first.weight, product.weight
    product.biases = [*first.biases, *product.biases]
    product.inside += [*first.inside, first.end]
    del products[first.end]


def fuse_rounding(block: Block, product: Product) -> None:
    """Fuse the cast of rows that no other op reads into a product of few rows of experts."""
    rows = block.definition(product.lhs)
    if not has_few_rows(product) or op_name(rows) != RESHAPE or not is_one((shape_of(product.lhs) or [0, 0])[1]):
        return
    cast = block.definition(rows.args[0])
    if op_name(cast) != CAST or str(cast.args[0].ty.dtype) != "float32":
        return
    users = set(block.users[product.lhs])
    for index in [index for index in users if op_name(block.bindings[index].value) == CAST]:
        users |= set(block.users.get(block.bindings[index].var, []))
        users.discard(index)
    if block.sole_user(rows.args[0]) is not None and users <= {*product.inside, product.end}:
        product.rounded, product.lhs = str(product.lhs.ty.dtype), cast.args[0]


def _are_factors(first: Product, second: Product) -> bool:
    """Return whether two products have the same rows, experts and format."""
    same_rows = first.lhs.same_as(second.lhs) and first.index is not None and first.index.same_as(second.index)
    is_single = all(each.second is None and each.shares is None for each in (first, second))
    sizes = [(each.columns, each.experts, form_of(each.weight), len(each.biases)) for each in (first, second)]
    return same_rows and is_single and sizes[0] == sizes[1]
