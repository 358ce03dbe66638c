"""`If`: both branches become a Relax `If`. Sizes in which their results differ become symbolic variables.

If all inputs have static shapes, a branch may not fit them, as a model for two sample rates, whose frames differ, does.
The other branch is then the model, and calls that would take the one that does not fit are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import tvm
from tvm import relax, tirx

from ....errors import FrontendError
from ....op.require import MET, requirement
from ...joined_sizes import known_sizes
from ...symbolic_sizes import common_shape
from ..node_names import NodeInfo
from .subgraphs import Importer, OnnxImporter, inner_graph, known_number, scalar

_BRANCHES = ("then_branch", "else_branch")


def convert_if(importer: OnnxImporter, node: onnx.NodeProto, info: NodeInfo, condition: Any) -> list[Any]:
    """Convert an `If`; if its condition is constant, only the chosen branch.

    Raises FrontendError if the branches differ in element types, ranks, numbers of outputs, or lengths of sequences, or
    if one cannot be converted and inputs have symbolic sizes.
    """
    graphs = {name: inner_graph(node, name, info) for name in _BRANCHES}
    if condition is None:
        raise FrontendError(f"node {info} has no condition")
    static_condition = known_number(condition)
    if static_condition is not None:
        branch = "then_branch" if static_condition else "else_branch"
        return importer.graph_values(graphs[branch], info.subgraphs[branch], {})
    condition = scalar(importer, condition, "bool", f"node {info}: its condition")
    branches: list[tuple[list[relax.Binding], list[Any]]] = []
    misfits: dict[str, FrontendError] = {}
    for name in _BRANCHES:
        try:
            with importer.trial() as keep:
                with importer.block(info) as bindings:
                    values = importer.graph_values(graphs[name], info.subgraphs[name], {})
                    values = [importer.as_tensor(value) for value in values]
                keep()
            branches.append((bindings, values))
        except FrontendError as misfit:
            if known_sizes().has_symbolic_inputs or misfits:
                raise
            misfits[name] = misfit
    if misfits:
        (name, error), ((bindings, values),) = *misfits.items(), branches
        _require(importer, condition, name != "then_branch", f"node {info}: its {name} does not fit: {error}")
        importer.adopt(bindings, info)
        return values
    if any(len(values) != len(node.output) for _, values in branches):
        counts = " and ".join(str(len(values)) for _, values in branches)
        raise FrontendError(f"node {info} has {len(node.output)} outputs, but its branches give {counts}")
    titles = [f"output {index} ({name!r}) of node {info}" for index, name in enumerate(node.output)]
    return join_branches(importer, condition, branches, titles)


def _require(importer: Importer, condition: relax.Expr, expected: bool, message: str) -> None:
    """Refuse calls in which a boolean scalar has not the expected value."""
    flag = importer.bb.emit(relax.op.reshape(relax.op.astype(condition, "int64"), (1,)))
    taken = tirx.Var("taken", "int64")
    importer.bb.match_cast(importer.bb.emit(relax.op.tensor_to_shape(flag)), relax.ShapeType([taken]))
    importer.bb.match_cast(requirement(tirx.EQ(taken, tirx.const(int(expected), "int64")), message), MET)


def join_branches(
    importer: Importer,
    condition: relax.Expr,
    branches: Sequence[tuple[list[relax.Binding], list[Any]]],
    titles: Sequence[str],
) -> list[relax.Expr]:
    """Emit an `If` on a boolean scalar, the first branch being the true one, and return its results.

    `branches`: bindings and results of both, collected at the builder's position; `titles`: name of each result in
    messages. Raises FrontendError if the branches differ in element types, ranks, or lengths of sequences.
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
    return [_name_sizes(importer, field, a.ty, b.ty) for field, (a, b) in zip(fields, pairs, strict=True)]


def _check_pair(then: Any, other: Any, title: str) -> None:
    """Raise FrontendError unless the results of two branches can be one value."""
    if not isinstance(then, relax.Expr) or not isinstance(other, relax.Expr):
        raise FrontendError(f"{title} is an empty optional, or a sequence of dynamic length, in a branch")
    _check_types(then.ty, other.ty, title)


def _check_types(then: tvm.ir.Type, other: tvm.ir.Type, title: str) -> None:
    if isinstance(then, tvm.ir.TupleType) and isinstance(other, tvm.ir.TupleType):
        if len(then.fields) != len(other.fields):
            raise FrontendError(
                f"{title} is a sequence of {len(then.fields)} tensors in one branch and of {len(other.fields)} in the "
                "other; expected sequences of one length"
            )
        for index, (a, b) in enumerate(zip(then.fields, other.fields, strict=True)):
            _check_types(a, b, f"element {index} of {title}")
        return
    if not isinstance(then, relax.TensorType) or not isinstance(other, relax.TensorType):
        raise FrontendError(f"{title} is {then} in one branch and {other} in the other, expected two tensors")
    if str(then.dtype) != str(other.dtype):
        raise FrontendError(f"{title} is of {then.dtype} in one branch and of {other.dtype} in the other")
    if then.ndim != other.ndim or then.ndim < 0:
        raise FrontendError(
            f"{title} has {_rank(then)} dimensions in one branch and {_rank(other)} in the other; expected one rank in "
            "both"
        )


def _rank(ty: relax.TensorType) -> str:
    return str(ty.ndim) if ty.ndim >= 0 else "an unknown number of"


def _name_sizes(importer: Importer, value: relax.Expr, then: Any, other: Any) -> relax.Expr:
    """Give a result of an `If` a symbolic variable for each size that depends on the branch."""
    value = importer.bb.normalize(value)
    if isinstance(value.ty, tvm.ir.TupleType):
        fields = zip(then.fields, other.fields, strict=True)
        return relax.Tuple(
            [_name_sizes(importer, relax.TupleGetItem(value, index), a, b) for index, (a, b) in enumerate(fields)]
        )
    if isinstance(value.ty.shape, relax.ShapeExpr):
        return value
    shape = common_shape(then, other, "branch")
    return importer.bb.match_cast(importer.bb.emit(value), relax.TensorType(shape, then.dtype))
