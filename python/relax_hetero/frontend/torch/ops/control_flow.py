"""Ops with nested graphs: conditions, loops, and plain calls."""

from __future__ import annotations

from typing import Any

from tvm import relax

from ...onnx.control_flow.branches import join_branches
from ...onnx.control_flow.loop import Loop, Trip
from ...onnx.control_flow.loop_nodes import run, slice_at
from ...onnx.control_flow.subgraphs import known_number
from ..torch_node import TorchNode, converts


def _num_nodes(module: Any) -> int:
    return len(module.graph.nodes)


def _scalar(node: TorchNode, value: Any) -> relax.Expr:
    """Convert a condition to a boolean scalar."""
    return node.cast(node.reshape(node.walk.as_tensor(value), []), "bool")


def _tensors(node: TorchNode, values: Any) -> list[Any]:
    return [node.walk.as_tensor(value) for value in values]


@converts("cond")
def cond(node: TorchNode, condition: Any, then: Any, otherwise: Any, operands: Any = ()) -> list[Any]:
    """Convert a condition with two graphs."""
    condition = _scalar(node, condition)
    static = known_number(condition)
    if static is not None:
        return node.walk.graph_of(then if static else otherwise, operands)
    branches = []
    for module in (then, otherwise):
        with node.walk.block(node.info) as bindings:
            values = _tensors(node, node.walk.graph_of(module, operands))
        branches.append((bindings, values))
    return join_branches(
        node.walk, condition, branches, [f"result {i} of node {node.info}" for i in range(len(branches[0][1]))]
    )


@converts("while_loop")
def while_loop(node: TorchNode, going: Any, body: Any, carried: Any, captured: Any = ()) -> list[Any]:
    """Convert a loop that runs while a condition holds."""

    def is_going(values: Any) -> relax.Expr:
        (results,) = node.walk.graph_of(going, [*values, *captured])
        return _scalar(node, results)

    def trip(_: Any, __: Any, values: list[Any]) -> Trip:
        results = _tensors(node, node.walk.graph_of(body, [*values, *captured]))
        return Trip(is_going(results), results, [])

    state = _tensors(node, carried)
    names = [f"value {i}" for i in range(len(state))]
    nodes = _num_nodes(going) + _num_nodes(body)
    loop = Loop(node.info, f"node {node.info}", nodes, None, is_going(state), state, 0, trip, names)
    return run(node.walk, loop).state


@converts("scan")
def scan(node: TorchNode, body: Any, initial: Any, slices: Any, captured: Any = ()) -> list[Any]:
    """Convert a loop over the first axes, with loop-carried values and stacked rows."""
    return _over_slices(node, body, initial, slices, captured)


@converts("map_impl")
def map_(node: TorchNode, body: Any, slices: Any, captured: Any = ()) -> list[Any]:
    """Apply a graph to each entry of the first axes."""
    return _over_slices(node, body, [], slices, captured)


def _over_slices(node: TorchNode, body: Any, initial: Any, slices: Any, captured: Any) -> list[Any]:
    walk, state = node.walk, _tensors(node, initial)

    def trip(index: Any, _: Any, values: list[Any]) -> Trip:
        entries = [slice_at(walk, value, 0, index, False) for value in slices]
        results = _tensors(node, walk.graph_of(body, [*values, *entries, *captured]))
        return Trip(None, results[: len(state)], results[len(state) :])

    lengths = [node.dims(value)[0] for value in slices]
    rows = len(node.value) - len(state)
    names = [f"value {i}" for i in range(len(state))]
    loop = Loop(node.info, f"node {node.info}", _num_nodes(body), lengths[0], None, state, rows, trip, names)
    results = run(walk, loop)
    return [*results.state, *results.rows]


@converts("wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph", "hints_wrapper", "strict_mode")
def call(node: TorchNode, *arguments: Any) -> list[Any]:
    """Inline a called graph; gradient and autocast modes have no effect in an exported program."""
    graph_index = next(index for index, value in enumerate(arguments) if hasattr(value, "graph"))
    inputs = list(arguments[graph_index + 1 :])
    if node.op.startswith("invoke"):
        inputs = inputs[1:]  # the name of the graph
    elif len(inputs) == 1 and isinstance(inputs[0], (list, tuple)):
        inputs = list(inputs[0])
    return node.walk.graph_of(arguments[graph_index], inputs)
