"""Which nodes a kernel computes, where lowering gave its result a name of its own or rewrote ops."""

from relax_hetero.artifact.metadata import Metadata
from relax_hetero.artifact.model_graph import KINDS, FunctionGraph, GraphNode, ModelGraph
from relax_hetero.report.kernel_groups import groups_of


def found(rows, entries):
    """The names of the nodes of each kernel; rows are kind, name, op and the places of what is read."""
    texts = list(dict.fromkeys(["", "llvm:0", *(text for _, name, op, *_ in rows for text in (name, op))]))
    nodes = tuple(
        GraphNode(
            *(KINDS.index(kind), texts.index(name), texts.index(op), 0, 1, ()),
            tuple(number for read in reads for number in (read, -1)),
        )
        for kind, name, op, *reads in rows
    )
    dispatches = [
        {"function": "main", "variable": variable, "kernel": "k", "device": "llvm:0", "ops": ops, "precision": "f32"}
        for variable, *ops in entries
    ]
    graph = ModelGraph(tuple(texts), (), (FunctionGraph("main", nodes),))
    groups = groups_of(Metadata((), -1, {}, fusions={"dispatches": dispatches, "declined": []}, graph=graph))
    return [[rows[node][1] for node in group["nodes"]] for group in groups]


def test_a_name_that_fusion_gave_is_found_by_its_ops():
    rows = [
        ("input", "x", ""),
        ("op", "n1", "relax.nn.batch_norm", 0),
        ("op", "n2", "relax.nn.relu", 1),
        ("op", "n3", "relax.nn.batch_norm", 2),
        ("op", "lv", "relax.nn.relu", 3),
    ]
    kernels = [("lv1", "multiply", "add", "relu"), ("lv2", "multiply", "add", "relu")]
    assert found(rows, kernels) == [["n1", "n2"], ["n3", "lv"]]


def test_a_name_of_the_model_is_found_though_its_op_was_rewritten():
    rows = [
        ("input", "x", ""),
        ("constant", "w", ""),
        ("op", "q.numbers", "relax.hetero.dequantize_blocks", 1),
        ("op", "q", "relax.matmul", 0, 2),
        ("op", "a", "relax.hetero.cached_attention", 3),
    ]
    assert found(rows, [("q_rhs", "pack"), ("q", "block_matmul"), ("a_scratch", "softmax", "matmul")]) == [
        [],
        ["q.numbers", "q"],
        ["a"],
    ]


def test_what_was_computed_at_compile_time_has_no_kernel():
    rows = [
        ("input", "x", ""),
        ("constant", "w", ""),
        ("op", "turned", "relax.permute_dims", 1),
        ("op", "y", "relax.matmul", 0, 2),
    ]
    assert found(rows, [("y_encoded", "matmul")]) == [["y"]]


def test_a_value_that_two_kernels_read_is_in_neither():
    rows = [
        ("input", "x", ""),
        ("op", "both", "relax.silu", 0),
        ("op", "y", "relax.exp", 1),
        ("op", "z", "relax.tanh", 1),
    ]
    assert found(rows, [("y", "exp"), ("z", "tanh")]) == [["y"], ["z"]]
