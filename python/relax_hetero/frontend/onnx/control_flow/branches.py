"""`If`: both branches become a Relax `If`, whose result has the shape that both have, or sizes found at each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import tvm
from tvm import relax

from ....errors import FrontendError
from ...symbolic_sizes import common_shape
from ..node_names import NodeInfo
from .subgraphs import Importer, OnnxImporter, inner_graph, known_number, scalar

_BRANCHES = ("then_branch", "else_branch")


def convert_if(importer: OnnxImporter, node: onnx.NodeProto, info: NodeInfo, condition: Any) -> list[Any]:
    """The outputs of an `If`: of the branch that is taken, where that is known at import.

    Raises
    ------
    FrontendError
        The branches give different element types, ranks, numbers of outputs, or sequences of other lengths.
    """
    graphs = {name: inner_graph(node, name, info) for name in _BRANCHES}
    if condition is None:
        raise FrontendError(f"node {info} has no condition")
    known = known_number(condition)
    if known is not None:
        taken = "then_branch" if known else "else_branch"
        return importer.graph_values(graphs[taken], info.subgraphs[taken], {})
    condition = scalar(importer, condition, "bool", f"node {info}: its condition")
    found: list[tuple[list[relax.Binding], list[Any]]] = []
    for name in _BRANCHES:
        with importer.block(info) as bindings:
            values = [importer.as_tensor(v) for v in importer.graph_values(graphs[name], info.subgraphs[name], {})]
        found.append((bindings, values))
    if any(len(values) != len(node.output) for _, values in found):
        counts = " and ".join(str(len(values)) for _, values in found)
        raise FrontendError(f"node {info} has {len(node.output)} outputs, but its branches give {counts}")
    titles = [f"output {index} ({name!r}) of node {info}" for index, name in enumerate(node.output)]
    return join_branches(importer, condition, found, titles)


def join_branches(
    importer: Importer,
    condition: relax.Expr,
    branches: Sequence[tuple[list[relax.Binding], list[Any]]],
    titles: Sequence[str],
) -> list[relax.Expr]:
    """The results of an `If`: those of its first branch where a scalar of bool is true, else of its second.

    Parameters
    ----------
    branches : sequence of (list of relax.Binding, list of object)
        Bindings and results of both, collected where the builder stands.
    titles : sequence of str
        How messages call each result.

    Raises
    ------
    FrontendError
        The branches give different element types, ranks, or sequences of other lengths.
    """
    (_, then_values), (_, other_values) = branches
    pairs = list(zip(then_values, other_values, strict=True))
    for pair, title in zip(pairs, titles, strict=True):
        _check_pair(*pair, title)
    parts = (
        relax.SeqExpr([relax.BindingBlock(bindings)], values[0] if len(values) == 1 else relax.Tuple(values))
        for bindings, values in branches
    )
    result = importer.bb.emit(relax.If(condition, *parts))
    fields = [result] if len(pairs) == 1 else [relax.TupleGetItem(result, i) for i in range(len(pairs))]
    return [_named_sizes(importer, field, a.ty, b.ty) for field, (a, b) in zip(fields, pairs, strict=True)]


def _check_pair(then: Any, other: Any, what: str) -> None:
    """FrontendError unless the results of two branches can be one value."""
    if not isinstance(then, relax.Expr) or not isinstance(other, relax.Expr):
        raise FrontendError(f"{what} is an empty optional, or a sequence whose length only a call knows, in a branch")
    _check_types(then.ty, other.ty, what)


def _check_types(then: tvm.ir.Type, other: tvm.ir.Type, what: str) -> None:
    if isinstance(then, tvm.ir.TupleType) and isinstance(other, tvm.ir.TupleType):
        if len(then.fields) != len(other.fields):
            raise FrontendError(
                f"{what} is a sequence of {len(then.fields)} tensors in one branch and of {len(other.fields)} in the "
                "other; expected sequences of one length"
            )
        for index, (a, b) in enumerate(zip(then.fields, other.fields, strict=True)):
            _check_types(a, b, f"element {index} of {what}")
        return
    if not isinstance(then, relax.TensorType) or not isinstance(other, relax.TensorType):
        raise FrontendError(f"{what} is {then} in one branch and {other} in the other, expected two tensors")
    if str(then.dtype) != str(other.dtype):
        raise FrontendError(f"{what} is of {then.dtype} in one branch and of {other.dtype} in the other")
    if then.ndim != other.ndim or then.ndim < 0:
        raise FrontendError(
            f"{what} has {_rank(then)} dimensions in one branch and {_rank(other)} in the other; expected one rank in "
            "both"
        )


def _rank(ty: relax.TensorType) -> str:
    return str(ty.ndim) if ty.ndim >= 0 else "an unknown number of"


def _named_sizes(importer: Importer, value: relax.Expr, then: Any, other: Any) -> relax.Expr:
    """A result of an `If` with a name for each size that only the branch knows."""
    value = importer.bb.normalize(value)
    if isinstance(value.ty, tvm.ir.TupleType):
        fields = zip(then.fields, other.fields, strict=True)
        return relax.Tuple(
            [_named_sizes(importer, relax.TupleGetItem(value, index), a, b) for index, (a, b) in enumerate(fields)]
        )
    if isinstance(value.ty.shape, relax.ShapeExpr):
        return value
    shape = common_shape(then, other, "branch")
    return importer.bb.match_cast(importer.bb.emit(value), relax.TensorType(shape, then.dtype))
