"""Products of matrices with what ONNX Runtime's optimizer joins to them: transposes, factors, activations."""

from __future__ import annotations

from tvm import relax

from ..node import Node, const, dtype_of
from ..products import gemm, matmul
from ..table import MICROSOFT, convert_node, converts
from .fused_activations import activated


def _transposed(node: Node, index: int, letter: str) -> relax.Expr:
    """An operand of FusedMatMul: its last two axes change places, or its second to its last but one moves first."""
    value = node.tensor(index)
    axes = list(range(node.rank(value)))
    if node.attribute(f"transBatch{letter}", 0) and len(axes) > 2:
        # Given as (rows, batches ..., columns).
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if node.attribute(f"trans{letter}", 0) and len(axes) > 1:
        axes = [*axes[:-2], axes[-1], axes[-2]]
    return value if axes == sorted(axes) else node.emit(relax.op.permute_dims(value, axes))


@converts("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(node: Node) -> relax.Expr:
    """alpha * A' @ B', the axes of both in another order where attributes say so."""
    product = matmul(node, _transposed(node, 0, "A"), _transposed(node, 1, "B"))
    alpha = node.attribute("alpha", 1.0)
    return product if alpha == 1.0 else node.emit(relax.op.multiply(product, const(alpha, dtype_of(product))))


@converts("FusedMatMulActivation", domain=MICROSOFT)
def fused_matmul_activation(node: Node) -> relax.Expr:
    """A FusedMatMul and an activation; of Softmax along `activation_axis`."""
    product = fused_matmul(node)
    if node.attribute("activation") != "Softmax":
        return activated(node, product)
    softmax = node.as_op("Softmax", [product], 13, axis=node.attribute("activation_axis", -1))
    return convert_node(softmax)


@converts("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(node: Node) -> relax.Expr:
    """The approximation of gelu by tanh, of a product plus a bias."""
    product = matmul(node, node.tensor(0), node.tensor(1))
    gelu = node.as_op("FastGelu", [product, node.inputs[2] if node.has(2) else None])
    gelu.domain = MICROSOFT
    return convert_node(gelu)


@converts("FusedGemm", domain=MICROSOFT)
def fused_gemm(node: Node) -> relax.Expr:
    """A Gemm and an activation."""
    return activated(node, gemm(node))


@converts("MatMulInteger16", domain=MICROSOFT)
def matmul_integer16(node: Node) -> relax.Expr:
    """A product of 16-bit integers in int32, or in uint32 where both have no sign; sums wrap around."""
    operands = [node.tensor(index) for index in (0, 1)]
    is_unsigned = all(dtype_of(operand) == "uint16" for operand in operands)
    dtype = "uint32" if is_unsigned else "int32"
    return matmul(node, *(node.emit(relax.op.astype(operand, dtype)) for operand in operands))
