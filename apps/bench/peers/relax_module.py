"""The product as a Relax module, for this library and stock TVM."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

import relax_hetero as rh

from .product import Product


def relax_module(product: Product) -> tvm.IRModule:
    """``main(x)`` with a constant weight, or ``main(x, w)``; integers are cast to int32, as by the ONNX importer."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(product.lhs.shape, product.lhs.dtype.name))
    w = relax.Var("w", relax.TensorType(product.rhs.shape, product.rhs.dtype.name))
    with builder.function("main", [x] if product.weight else [x, w]):
        with builder.dataflow():
            operands: list[relax.Expr] = [x, relax.const(tensor(product.rhs)) if product.weight else w]
            if product.result_dtype.name == "int32":
                operands = [builder.emit(relax.op.astype(operand, "int32")) for operand in operands]
            y = builder.emit_output(relax.op.matmul(*operands, out_dtype=product.result_dtype.name))
        builder.emit_func_output(y)
    return builder.get()


def native_target(threads: int) -> tvm.target.Target:
    """This CPU with `threads` threads."""
    return tvm.target.Target({**dict(rh.native("llvm").export()), "num-cores": threads})


def tensor(array: np.ndarray) -> tvm.runtime.Tensor:
    """A copy in TVM's memory, at a cache line."""
    return tvm.runtime.tensor(array)
