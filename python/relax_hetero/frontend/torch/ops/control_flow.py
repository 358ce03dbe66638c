"""Ops with graphs in them: conditions, loops, and graphs that are only called."""

from __future__ import annotations

from typing import Any

from tvm import relax

from ...onnx.control_flow.branches import join_branches
from ...onnx.control_flow.loop import Loop, Trip
from ...onnx.control_flow.loop_nodes import run, slice_at
from ...onnx.control_flow.subgraphs import known_number
from ..node import TorchNode, converts


def _count(module: Any) -> int:
    return len(module.graph.nodes)


def _scalar(node: TorchNode, value: Any) -> relax.Expr:
    """A condition as a scalar of bool."""
    return node.cast(node.reshape(node.walk.as_tensor(value), []), "bool")


def _state(node: TorchNode, values: Any) -> list[Any]:
    return [node.walk.as_tensor(value) for value in values]


@converts("cond")
def cond(node: TorchNode, condition: Any, then: Any, otherwise: Any, operands: Any = ()) -> list[Any]:
    """The results of one of two graphs."""
    condition = _scalar(node, condition)
    known = known_number(condition)
    if known is not None:
        return node.walk.graph_of(then if known else otherwise, operands)
    made = []
    for module in (then, otherwise):
        with node.walk.block(node.info) as bindings:
            values = _state(node, node.walk.graph_of(module, operands))
        made.append((bindings, values))
    return join_branches(
        node.walk, condition, made, [f"result {i} of node {node.info}" for i in range(len(made[0][1]))]
    )


@converts("while_loop")
def while_loop(node: TorchNode, going: Any, body: Any, carried: Any, captured: Any = ()) -> list[Any]:
    """Values that trips hand on while a condition holds."""

    def is_going(values: Any) -> relax.Expr:
        (found,) = node.walk.graph_of(going, [*values, *captured])
        return _scalar(node, found)

    def trip(_: Any, __: Any, values: list[Any]) -> Trip:
        found = _state(node, node.walk.graph_of(body, [*values, *captured]))
        return Trip(is_going(found), found, [])

    state = _state(node, carried)
    names = [f"value {i}" for i in range(len(state))]
    nodes = _count(going) + _count(body)
    loop = Loop(node.info, f"node {node.info}", nodes, None, is_going(state), state, 0, trip, names)
    return run(node.walk, loop).state


@converts("scan")
def scan(node: TorchNode, body: Any, initial: Any, slices: Any, captured: Any = ()) -> list[Any]:
    """Values that trips hand on, and rows, one trip for each entry of the first axes."""
    return _over_slices(node, body, initial, slices, captured)


@converts("map_impl")
def map_(node: TorchNode, body: Any, slices: Any, captured: Any = ()) -> list[Any]:
    """A graph's results of each entry of the first axes."""
    return _over_slices(node, body, [], slices, captured)


def _over_slices(node: TorchNode, body: Any, initial: Any, slices: Any, captured: Any) -> list[Any]:
    walk, state = node.walk, _state(node, initial)

    def trip(index: Any, _: Any, values: list[Any]) -> Trip:
        entries = [slice_at(walk, value, 0, index, False) for value in slices]
        found = _state(node, walk.graph_of(body, [*values, *entries, *captured]))
        return Trip(None, found[: len(state)], found[len(state) :])

    lengths = [node.dims(value)[0] for value in slices]
    rows = len(node.value) - len(state)
    names = [f"value {i}" for i in range(len(state))]
    loop = Loop(node.info, f"node {node.info}", _count(body), lengths[0], None, state, rows, trip, names)
    found = run(walk, loop)
    return [*found.state, *found.rows]


@converts("wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph", "hints_wrapper", "strict_mode")
def call(node: TorchNode, *given: Any) -> list[Any]:
    """The results of a graph that is only called: gradients and casts of it mean nothing when it is exported."""
    place = next(index for index, value in enumerate(given) if hasattr(value, "graph"))
    operands = list(given[place + 1 :])
    if node.op.startswith("invoke"):
        operands = operands[1:]  # the name of the graph
    elif len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    return node.walk.graph_of(given[place], operands)
