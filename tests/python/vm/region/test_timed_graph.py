"""Graphs with events, on a driver in Python."""

from __future__ import annotations

import gc

import pytest

from relax_hetero.vm.device.cuda_driver import CudaError
from relax_hetero.vm.region.timed_graph import TimedGraph
from vm.fake_cuda import INVALID, FakeCuda, FakeLibrary

KERNEL, CHILD = 0, 4
EARLY = bytes([1, 0, 1, 0, 0, 0, 0, 0])  # data of an edge of a programmatic launch


@pytest.fixture
def cuda():
    return FakeCuda()


def captured_kinds(cuda, kinds):
    """Function that launches nodes of these kinds one after the other, those after kernels early."""

    def launch(stream):
        graph, last = cuda.captures[stream.handle], []
        for before, kind in zip([None, *kinds], kinds, strict=False):
            last = [cuda.add_node(graph, kind, last, EARLY if before == KERNEL else bytes(8))]

    return launch


def order(cuda):
    """Kinds of the nodes of the only graph, which follow each other."""
    ((graph, edges),) = cuda.edges.items()
    after = dict(edges)
    assert len(edges) == len(cuda.nodes[graph]) - 1 and not any(map(any, edges.values()))  # no launch is early
    (node,) = set(cuda.nodes[graph]) - {target for _, target in after}
    nodes = [node]
    while following := [target for source, target in after if source == nodes[-1]]:
        nodes += following
    return [cuda.nodes[graph][node] for node in nodes]


@pytest.mark.parametrize("kinds", [[KERNEL], [KERNEL] * 3, [KERNEL, CHILD, KERNEL, KERNEL], [CHILD, KERNEL]])
def test_an_event_follows_each_kernel(cuda, kinds):
    graph = TimedGraph(FakeLibrary(cuda), 0, captured_kinds(cuda, kinds))
    events = iter([("event", event.handle) for event in graph._events])
    expected = [next(events)]
    for kind in kinds:
        expected += [kind, *([next(events)] if kind == KERNEL else [])]
    assert order(cuda) == expected and not list(events)
    assert graph.microseconds() == [1500] * kinds.count(KERNEL)  # what the fake driver measures
    assert not cuda.graphs and cuda.executables == {graph.handle}
    del graph
    gc.collect()
    assert not cuda.executables


def test_a_kernel_with_two_followers_ends_before_both(cuda):
    def launch(stream):
        graph = cuda.captures[stream.handle]
        first = cuda.add_node(graph, KERNEL, [])
        second = cuda.add_node(graph, KERNEL, [first], EARLY)
        cuda.add_node(graph, KERNEL, [first, second])

    graph = TimedGraph(FakeLibrary(cuda), 0, launch)
    (edges,) = cuda.edges.values()
    (kinds,) = cuda.nodes.values()
    handles = [("event", event.handle) for event in graph._events]
    (begin, after_first, after_second, _), kernels = (
        [node for kind in wanted for node in kinds if kinds[node] == kind] for wanted in (handles, [KERNEL])
    )
    assert not any(map(any, edges.values()))
    expected = {(begin, kernels[0]), *((after_first, kernel) for kernel in kernels[1:]), (after_second, kernels[2])}
    assert expected < {*edges} and len(edges) == 7


@pytest.mark.parametrize("function", ["cuGraphGetEdges_v2", "cuGraphAddEventRecordNode", "cuGraphInstantiateWithFlags"])
def test_a_driver_that_cannot_edit_graphs_is_an_error(cuda, function):
    cuda.failing[function] = INVALID
    with pytest.raises(CudaError, match=f"{function} failed"):
        TimedGraph(FakeLibrary(cuda), 0, captured_kinds(cuda, [KERNEL, KERNEL]))
    assert not cuda.graphs
