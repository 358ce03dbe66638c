"""torch: its plain products, and the packed linear ops that its compiler calls (oneDNN)."""

from __future__ import annotations

import numpy as np
import torch

from .product import BF16, Contestant, Product, empty
from .shape import Unsupported

# Without AMX, oneDNN computes int8 products of a signed left operand in a reference loop: minutes at 2048 cubed.
_SLOW_SIGNED = 2**27


def plain(product: Product, threads: int) -> Contestant:
    """``torch.mm(out=)``, ``torch.bmm(out=)`` and, for integers, ``torch._int_mm(out=)``."""
    torch.set_num_threads(threads)
    x, w = _tensor(product.lhs), _tensor(product.rhs)
    y = _tensor(empty(product.result_shape, product.result_dtype))
    if product.kind in ("u8s8", "s8s8"):
        if product.shape.batch:
            raise Unsupported("torch has no batched integer product")
        multiply, note = torch._int_mm, "torch._int_mm"
    else:
        multiply, note = (torch.bmm if product.shape.batch else torch.mm), ""

    def call() -> None:
        with torch.inference_mode():
            multiply(x, w, out=y)

    return Contestant(call, lambda: _array(y), note)


def packed(product: Product, threads: int) -> Contestant:
    """oneDNN's linear ops over a prepacked weight; they allocate their result."""
    if not product.weight:
        raise Unsupported("torch packs weights only")
    torch.set_num_threads(threads)
    x, transposed = _tensor(product.lhs), _tensor(product.rhs).t().contiguous()
    results: list[torch.Tensor] = []
    if product.kind in ("f32", "bf16", "f16"):
        weight = torch.ops.mkldnn._reorder_linear_weight(transposed, product.shape.m)
        linear = torch.ops.mkldnn._linear_pointwise

        def call() -> None:
            with torch.inference_mode():
                results.clear()
                results[:] = [linear(x, weight, None, "none", [], "")]

        return Contestant(call, lambda: _array(results[0]), "mkldnn._linear_pointwise, weight reordered")
    if product.kind == "s8s8" and product.shape.operations > _SLOW_SIGNED:
        raise Unsupported("onednn.qlinear_pointwise of a signed operand is a reference loop here")
    weight = torch.ops.onednn.qlinear_prepack(transposed, list(x.shape))
    scales, points = torch.ones(product.shape.n), torch.zeros(product.shape.n, dtype=torch.int64)
    quantized = torch.ops.onednn.qlinear_pointwise

    def call_quantized() -> None:
        with torch.inference_mode():
            results.clear()
            results[:] = [quantized(x, 1.0, 0, weight, scales, points, None, 1.0, 0, torch.float32, "none", [], "")]

    return Contestant(call_quantized, lambda: _array(results[0]), "onednn.qlinear_pointwise, float32 result")


def _tensor(array: np.ndarray) -> torch.Tensor:
    return (
        torch.from_numpy(array.view("int16")).view(torch.bfloat16) if array.dtype == BF16 else torch.from_numpy(array)
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(BF16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
