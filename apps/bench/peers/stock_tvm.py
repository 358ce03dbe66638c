"""Stock TVM: ``tvm.compile`` with its default pipeline for this CPU."""

from __future__ import annotations

import numpy as np
import tvm

from .product import Contestant, Product
from .relax_module import native_target, relax_module, tensor
from .shape import Unsupported

# Stock TVM computes about half a billion operations a second: 4 seconds a call at 1024 cubed.
_MAX_OPERATIONS = 2 * 1024**3


def matmul(product: Product, threads: int) -> Contestant:
    """The virtual machine's function on tensors; it allocates its result."""
    if product.shape.operations > _MAX_OPERATIONS:
        raise Unsupported("more than some seconds a call")
    executable = tvm.compile(relax_module(product), native_target(threads))
    main = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"]
    operands = [tensor(product.lhs)] + ([] if product.weight else [tensor(product.rhs)])
    results: list[tvm.runtime.Tensor] = []

    def call() -> None:
        results[:] = [main(*operands)]

    return Contestant(call, lambda: np.asarray(results[0].numpy()))
