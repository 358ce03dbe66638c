"""SetEncoding: every matrix product and convolution says what its operands are for.

Before::

    y: R.Tensor((8, 4), "float32") = R.matmul(x, w)

After::

    lhs = R.hetero.set_encoding(x, "matmul[0]<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=8, n=4, k=6>")
    rhs = R.hetero.set_encoding(w, "matmul[1]<...>")
    out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]<...>")
    y: R.Tensor((8, 4), "float32") = R.hetero.unset_encoding(out, "matmul[2]<...>")

`R.nn.conv1d`, `conv2d` and `conv3d` of floats and bytes become `R.hetero.conv` (`encoded_convolutions`).
`R.matmul` in every form becomes `R.hetero.matmul`: batched and broadcast, of vectors (reshaped to matrices), of half
precision (accumulated in float32), of 8-bit integers. Products and convolutions of 8-bit integers, written as those of
wider numbers, become integer ones (`quantized_products`, `quantized_convolutions`). Left alone are products of other
integers, of unknown rank or shape, and of shapes that do not provably fit.

Convolutions carry the accuracy that `rh.compile` was asked for, where that is not the default.

Assumes nothing, and asks no device anything: every product is encoded, and SpecializeEncodings cancels what a
device has no layout for. A second run changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tvm
from tvm import relax

from ...encoding.encoding import LHS, RHS
from ...target.element_types import TF32
from ..ir.blocks import Block, rewrite_function, shape_of, without_unused
from ..ir.declare import declare_pass
from ..ir.module_attrs import WITHOUT_TF32
from ..ir.rewriting import op_name, relax_functions, with_functions
from ..quantize.quantized_operands import is_part_of_quantized
from .accuracies import Accuracies
from .encoded_convolutions import emit_convolution
from .encoded_products import ProductWriter, as_matrix, product_encoding, with_one_k
from .quantized_convolutions import emit_quantized_convolution
from .quantized_products import emit_quantized_product

# Type of the operands -> type of the accumulator. What is narrower is accumulated in single: one rounding, at the end.
_ACCUMULATORS = {
    "float32": "float32",
    "float64": "float64",
    **dict.fromkeys(("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"), "float32"),
}


def set_encoding(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    constants: dict[Any, relax.Expr] = {}
    functions = {}
    accuracies = Accuracies(mod)
    for gv, func in relax_functions(mod):
        exact = frozenset(map(str, func.attrs[WITHOUT_TF32])) if WITHOUT_TF32 in func.attrs else None
        rewrite = partial(_encode_block, function=gv.name_hint, constants=constants, exact=exact, accuracies=accuracies)
        functions[gv] = rewrite_function(func, rewrite)
    return with_functions(mod, functions)


SetEncoding = declare_pass("SetEncoding", set_encoding)


def _encode_block(
    block: Block,
    function: str,
    constants: dict[Any, relax.Expr],
    exact: frozenset[str] | None,
    accuracies: Accuracies,
) -> list[relax.Binding] | None:
    """The block with its products encoded; `exact` names those of float32 that stay exact, None: all."""
    writer = ProductWriter(block.is_dataflow)
    changed = quantized = False
    for binding in block.bindings:
        if isinstance(binding, relax.VarBinding) and emit_quantized_convolution(
            writer, binding, block, constants, function
        ):
            changed = quantized = True
            continue
        tf32 = exact is not None and binding.var.name not in exact
        if isinstance(binding, relax.VarBinding) and emit_convolution(
            writer, binding, function, tf32, accuracies.of(binding.var.name)
        ):
            changed = True
            continue
        if isinstance(binding, relax.VarBinding) and op_name(binding.value) == "relax.matmul":
            if emit_quantized_product(writer, binding, block, constants):
                changed = quantized = True
                continue
            if _emit_float_product(writer, binding, tf32):
                changed = True
                continue
        writer.bindings.append(binding)
    if not changed:
        return None
    return without_unused(writer.bindings, block, is_part_of_quantized) if quantized else writer.bindings


def _emit_float_product(writer: ProductWriter, binding: relax.VarBinding, tf32: bool) -> bool:
    var = binding.var
    lhs, rhs = binding.value.args
    lhs_shape, rhs_shape = shape_of(lhs), shape_of(rhs)
    dtype, wanted = str(lhs.ty.dtype), str(var.ty.dtype)
    if not lhs_shape or not rhs_shape or str(rhs.ty.dtype) != dtype or dtype not in _ACCUMULATORS:
        return False
    if wanted not in _ACCUMULATORS:
        return False
    if wanted == "float64":
        dtype = wanted
    shapes = with_one_k(as_matrix(lhs_shape, LHS), as_matrix(rhs_shape, RHS))
    multiplied = TF32 if tf32 and dtype == "float32" else dtype
    encoding = product_encoding(*shapes, (multiplied, multiplied, _ACCUMULATORS[dtype]))
    if encoding is None or shape_of(var) is None:
        return False
    name = var.name
    operands = []
    for index, side, x in ((LHS, "lhs", lhs), (RHS, "rhs", rhs)):
        matrix = writer.matrix(writer.cast(x, dtype, f"{name}_{side}_{dtype}"), index, f"{name}_{side}")
        operands.append(writer.matched(matrix, shapes[index], f"{name}_{side}_matched"))
    out = writer.product(operands[LHS], operands[RHS], encoding, name)
    plain = writer.plain(out, encoding, f"{name}_plain")
    writer.end_as(writer.cast(plain, wanted, f"{name}_{wanted}"), var)
    return True
