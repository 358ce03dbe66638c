"""Products of a `Scan`'s slices with weights: computed for all trips at once, in front of the loop.

``xt @ W`` of each slice is a slice of ``x @ W``. One product of many rows takes less time than many products of a row,
and recurrent layers spend half of theirs on these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx
import tvm
from tvm import relax

from ..check_model import STANDARD_DOMAINS
from ..node_names import NodeInfo
from .subgraphs import OnnxImporter


@dataclass(frozen=True)
class Product:
    """A node ``xt @ W`` of a body, by its position; `scanned` is the number of the input that it reads a slice of."""

    position: int
    scanned: int
    weight: relax.Expr
    result: str


def products_of_slices(importer: OnnxImporter, body: onnx.GraphProto, names: list[str]) -> list[Product]:
    """The products of slices, called `names`, with matrices that are known around the loop."""
    own = {value.name for value in body.input} | {name for node in body.node for name in node.output}
    own |= {tensor.name for tensor in body.initializer}
    found = []
    for position, node in enumerate(body.node):
        if node.op_type != "MatMul" or node.domain not in STANDARD_DOMAINS or node.input[0] not in names:
            continue
        weight: Any = None if node.input[1] in own else importer.value(node.input[1])
        is_computed = isinstance(weight, relax.Var) and weight in importer.known
        if not is_computed and not isinstance(weight, tvm.ir.GenericConst):
            continue
        if isinstance(weight.ty, relax.TensorType) and weight.ty.ndim == 2:
            found.append(Product(position, names.index(node.input[0]), weight, node.output[0]))
    return found


def with_products_in_front(
    importer: OnnxImporter,
    body: onnx.GraphProto,
    infos: list[NodeInfo],
    products: list[Product],
    inputs: list[relax.Expr],
) -> tuple[onnx.GraphProto, list[NodeInfo], list[relax.Expr]]:
    """A body without products, its nodes' names, and the products: what it scans besides, along the first axis.

    Parameters
    ----------
    inputs : list of relax.Expr
        Tensors that the body scans, their axis first.
    """
    left_out = {product.position for product in products}
    rest = onnx.GraphProto()
    rest.CopyFrom(body)
    del rest.node[:]
    rest.node.extend(node for position, node in enumerate(body.node) if position not in left_out)
    made = []
    for product in products:
        rest.input.add(name=product.result)
        with importer.block(infos[product.position]) as bindings:
            result = importer.bb.emit(relax.op.matmul(inputs[product.scanned], product.weight))
        importer.adopt(bindings, infos[product.position])
        made.append(result)
    return rest, [info for position, info in enumerate(infos) if position not in left_out], made
