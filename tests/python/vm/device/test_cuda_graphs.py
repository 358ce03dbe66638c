"""CUDA graphs on a driver in Python: what is captured, and which nodes follow which after an edit."""

from __future__ import annotations

import pytest

from relax_hetero.vm.device.cuda_driver import CudaError
from relax_hetero.vm.device.cuda_graphs import KERNEL, captured, executable_graph, remove_events
from relax_hetero.vm.device.cuda_streams import Stream
from vm.fake_cuda import EVENT_RECORD, INVALID, WAIT_EVENT, FakeCuda, FakeLibrary


@pytest.fixture
def cuda():
    return FakeCuda()


def graph_of(cuda, kinds, edges):
    """A graph with nodes of these kinds, whose edges are pairs of their positions; returns it and the nodes."""
    nodes = [cuda.add_node(1, kind, []) for kind in kinds]
    cuda.edges[1] = {(nodes[source], nodes[target]): bytes(8) for source, target in edges}
    return 1, nodes


@pytest.mark.parametrize(
    ("kinds", "edges", "expected"),
    [
        ([WAIT_EVENT, KERNEL, EVENT_RECORD], [(0, 1), (1, 2)], []),
        ([KERNEL, WAIT_EVENT, EVENT_RECORD, KERNEL], [(0, 1), (1, 2), (2, 3)], [(0, 3)]),
        ([KERNEL, EVENT_RECORD, KERNEL, KERNEL], [(0, 1), (1, 2), (1, 3), (0, 2), (2, 3)], [(0, 2), (0, 3), (2, 3)]),
        ([KERNEL, KERNEL, WAIT_EVENT, KERNEL], [(0, 2), (1, 2), (2, 3)], [(0, 3), (1, 3)]),
        ([KERNEL, KERNEL], [(0, 1)], [(0, 1)]),
        ([KERNEL], [], []),
        ([], [], []),
    ],
)
def test_nodes_around_events_follow_each_other(cuda, kinds, edges, expected):
    graph, nodes = graph_of(cuda, kinds, edges)
    remove_events(FakeLibrary(cuda), graph)
    assert [*cuda.nodes.get(graph, {}).values()] == [KERNEL] * kinds.count(KERNEL)
    assert {*cuda.edges[graph]} == {(nodes[source], nodes[target]) for source, target in expected}


def test_captures_end_if_a_launch_fails(cuda):
    library = FakeLibrary(cuda)
    streams = [Stream(library, gpu) for gpu in (0, 1)]

    def launch():
        assert len(cuda.captures) == 2
        raise CudaError("no")

    with pytest.raises(CudaError, match="no"):
        captured(library, streams, launch)
    assert not cuda.captures


@pytest.mark.parametrize("function", ["cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphUpload"])
def test_errors_name_the_function_that_failed(cuda, function):
    cuda.failing[function] = INVALID
    with pytest.raises(CudaError, match=f"{function} failed: CUDA_ERROR_INVALID_VALUE"):
        executable_graph(FakeLibrary(cuda), 0, lambda stream: None)
    assert not cuda.graphs
