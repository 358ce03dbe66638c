"""Traces: valid in the Trace Event Format, and true to what happened."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.artifact.schedule import Step
from relax_hetero.vm.queue.trace import RESULT, RanStep, TracedCall, chrome_events, serialize_tracks
from seeds import fresh_rng

GATES: dict[str, threading.Event] = {}
WAIT = 60


@tvm.register_global_func("relax_hetero.test.trace.gate", override=True)
def gate(x):
    """Waits until the test lets it pass; refuses negative numbers."""
    GATES["open"].wait(WAIT)
    if (x.numpy() < 0).any():
        raise ArithmeticError("negative input")
    return x


@I.ir_module
class Pipeline:
    """Two stages on two devices."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

    @R.function
    def main(x: R.Tensor((8, 64), "float32", "llvm:0")):
        with R.dataflow():
            a = R.nn.softmax(R.exp(x))
            b = R.to_vdevice(a, "llvm:1")
            c = R.nn.relu(R.negative(b))
            R.output(c)
        return c


@I.ir_module
class Gated:
    """A kernel in Python after a stage."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32", "llvm:0")):
        y: R.Tensor((4,), "float32", "llvm:0") = R.call_packed(
            "relax_hetero.test.trace.gate", x, ty_args=[R.Tensor((4,), "float32", "llvm:0")]
        )
        return y


@pytest.fixture(scope="module")
def pipeline() -> rh.vm.Executable:
    return rh.compile(Pipeline)


@pytest.fixture
def gated():
    GATES["open"] = threading.Event()
    yield rh.vm.VirtualMachine(rh.compile(Gated))
    GATES["open"].set()


def inputs(count: int) -> list[np.ndarray]:
    return list(fresh_rng().standard_normal((count, 8, 64)).astype("float32"))


def nanoseconds(microseconds):
    return round(microseconds * 1000)


def span(event):
    """When a slice begins and ends, in nanoseconds."""
    begin = nanoseconds(event["ts"])
    return begin, begin + nanoseconds(event["dur"])


def slices_by_track(events):
    by_track = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_track[event["tid"]].append(event)
    return {track: sorted(slices, key=span) for track, slices in by_track.items()}


def enclosing(slices, event):
    """The slice of a track that a flow's end lies in."""
    moment = nanoseconds(event["ts"])
    inside = [found for found in slices[event["tid"]] if span(found)[0] <= moment < span(found)[1]]
    assert len(inside) == 1, event
    return inside[0]


def arrows(events):
    """Pairs of slices that flows join."""
    slices = slices_by_track(events)
    ends = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
    pairs = []
    for both in ends.values():
        assert both["s"]["ts"] <= both["f"]["ts"] and both["f"]["bp"] == "e"
        assert (both["s"]["name"], both["s"]["cat"]) == (both["f"]["name"], both["f"]["cat"])
        assert both["s"]["tid"] != both["f"]["tid"]
        pairs.append((enclosing(slices, both["s"]), enclosing(slices, both["f"])))
    return pairs


def check(events):
    """Check the rules that every trace follows."""
    assert json.loads(json.dumps(events)) == events
    assert {event["ph"] for event in events} <= set("MXsfC")
    assert len({event["pid"] for event in events}) == 1
    titles = [event["tid"] for event in events if event["name"] == "thread_name"]
    slices = slices_by_track(events)
    assert sorted(titles) == sorted(slices)
    for track in slices.values():
        for before, after in zip(track, track[1:], strict=False):
            assert span(before)[1] <= span(after)[0]
        assert all(event["dur"] > 0 for event in track)
    counters = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["name"]].append(event)
            assert all(value >= 0 for value in event["args"].values())
    for samples in counters.values():
        assert [event["ts"] for event in samples] == sorted(event["ts"] for event in samples)
        assert set(samples[-1]["args"].values()) == {0}
    for source, target in arrows(events):
        assert source["args"]["call"] == target["args"]["call"]


def named(events, name):
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def test_a_pipeline_shows_its_steps_transfers_and_calls(pipeline, tmp_path):
    vm = rh.vm.VirtualMachine(pipeline, max_in_flight=3)
    with vm.trace() as trace:
        fences = [vm.submit("main", x) for x in inputs(10)]
    assert all(fence.done() for fence in fences)
    trace.save(tmp_path / "out.json")
    saved = json.loads((tmp_path / "out.json").read_text())
    events = saved["traceEvents"]
    check(events)
    assert saved["otherData"] == {"calls": 10, "calls_left_out": 0}
    names = Counter(event["name"] for event in events if event["ph"] == "X")
    assert names == {"main": 10, "main_step": 10, "llvm:0 to llvm:1": 10, "main_step_1": 10, "result": 10}
    step = named(events, "main_step")[0]["args"]
    assert step["device"] == "llvm:0" and {"exp", "softmax"} <= set(step["ops"]) and step["bytes"] == 8 * 64 * 4
    assert {call["args"]["outcome"] for call in named(events, "main")} == {"done"}
    flights = [event["args"]["calls"] for event in events if event["name"] == "calls in flight"]
    assert 1 <= max(flights) <= 3
    titles = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert {"queue of llvm:0", "queue of llvm:1"} <= set(titles)
    assert {event["tid"] for event in named(events, "main_step")} == {titles["queue of llvm:0"]}
    assert {event["tid"] for event in named(events, "main_step_1")} == {titles["queue of llvm:1"]}


def test_flows_follow_what_each_call_reads(pipeline):
    vm = rh.vm.VirtualMachine(pipeline)
    with vm.trace() as trace:
        for x in inputs(4):
            vm.submit("main", x)
    actual = Counter((source["name"], target["name"]) for source, target in arrows(trace.events()))
    # The transfer is another name of the same memory: it is made where the first stage ran.
    assert actual == {("main", "main_step"): 4, ("llvm:0 to llvm:1", "main_step_1"): 4, ("result", "main"): 4}


def test_bytes_between_steps_are_those_of_the_values_there(pipeline):
    vm = rh.vm.VirtualMachine(pipeline)
    with vm.trace() as trace:
        vm.submit("main", inputs(1)[0])
    counted = [event["args"] for event in trace.events() if event["name"] == "bytes between steps"]
    size = 8 * 64 * 4
    assert [(args["llvm:0"], args["llvm:1"]) for args in counted] in (
        [(size, 0), (size, size), (0, size), (0, 0)],
        [(size, 0), (0, size), (0, 0)],
    )


def test_busy_shares_are_of_the_time_of_all_calls(pipeline):
    vm = rh.vm.VirtualMachine(pipeline)
    with vm.trace() as trace:
        assert trace.busy() == {}
        for x in inputs(6):
            vm.submit("main", x).result()
    busy = trace.busy()
    assert set(busy) == {"queue of llvm:0", "queue of llvm:1"}
    assert all(0 < share < 1 for share in busy.values()) and sum(busy.values()) <= 1  # one call at a time


def test_plain_calls_are_seen_and_give_the_same(pipeline, plumbing):
    x = inputs(1)[0]
    vm = rh.vm.VirtualMachine(pipeline)
    expected = vm["main"](x).numpy()
    with vm.trace() as trace:
        np.testing.assert_array_equal(vm["main"](x).numpy(), expected)
    assert len(trace.calls) == 1
    np.testing.assert_array_equal(vm["main"](x).numpy(), expected)
    assert len(trace.calls) == 1  # the trace is over
    one = rh.vm.VirtualMachine(plumbing)  # without a schedule
    with one.trace() as trace:
        one["same_extent"](x[0], x[1])
    check(trace.events())
    assert [event["name"] for event in trace.events() if event["ph"] == "X"] == ["same_extent", "same_extent", "result"]


def test_a_failure_shows_where_it_happened(gated):
    GATES["open"].set()
    with gated.trace() as trace:
        fence = gated.submit("main", -np.ones(4, "float32"))
        gated.submit("main", np.ones(4, "float32"))
    assert isinstance(fence.exception(), rh.HeteroError)
    events = trace.events()
    check(events)
    failed, done = [event for event in named(events, "main") if "outcome" in event["args"]]
    assert "negative input" in failed["args"]["outcome"] and done["args"]["outcome"] == "done"
    (slice_,) = [event for event in events if event["ph"] == "X" and "error" in event["args"]]
    assert slice_["args"]["call"] == 1 and "negative input" in slice_["args"]["error"]
    assert (slice_["name"], "main") in {(source["name"], target["name"]) for source, target in arrows(events)}


def test_a_cancelled_call_has_no_steps(gated):
    with gated.trace() as trace:
        gated.submit("main", np.ones(4, "float32"))
        second = gated.submit("main", np.ones(4, "float32"))
        assert second.cancel()
        GATES["open"].set()
    events = trace.events()
    check(events)
    assert [call.outcome for call in trace.calls] == ["done", "cancelled"]
    assert {event["args"]["call"] for event in events if event["ph"] == "X" and event["cat"] != "call"} == {1}


def test_calls_that_wait_for_others_and_calls_that_never_begin(pipeline):
    vm = rh.vm.VirtualMachine(rh.compile(Square))
    with vm.trace() as trace:
        first = vm.submit("main", np.full((8, 8), 2, "float32"))
        second = vm.submit("main", first)
        with pytest.raises(rh.BindingError):
            vm.submit("main", np.ones(3, "float32"))
        late = vm.submit("main", vm.submit("main", second))
    np.testing.assert_array_equal(late.result().numpy(), np.full((8, 8), 2**16))
    check(trace.events())
    assert [call.outcome for call in trace.calls] == ["done", "done", "cancelled", "done", "done"]


@I.ir_module
class Square:
    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0)]})

    @R.function
    def main(x: R.Tensor((8, 8), "float32", "llvm:0")):
        with R.dataflow():
            y: R.Tensor((8, 8), "float32", "llvm:0") = R.multiply(x, x)
            R.output(y)
        return y


def test_a_long_trace_reports_dropped_events(pipeline, tmp_path):
    vm = rh.vm.VirtualMachine(pipeline)
    with vm.trace(limit=2) as trace:
        for x in inputs(5):
            vm.submit("main", x)
    assert (len(trace.calls), trace.left_out) == (2, 3)
    trace.save(tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["otherData"] == {"calls": 2, "calls_left_out": 3}
    check(data["traceEvents"])


def test_one_trace_at_a_time_and_a_limit_that_makes_sense(pipeline):
    vm = rh.vm.VirtualMachine(pipeline)
    for limit in (0, -1, True, 1.5, "all"):
        with pytest.raises(rh.BindingError, match="limit of a trace"):
            vm.trace(limit)
    with vm.trace() as trace, pytest.raises(rh.HeteroError, match="being traced already"), vm.trace():
        pass
    vm["main"](inputs(1)[0])
    with vm.trace() as trace:
        vm["main"](inputs(1)[0])
    assert len(trace.calls) == 1


def test_an_error_in_the_block_ends_the_trace(gated):
    with pytest.raises(ZeroDivisionError), gated.trace() as trace:
        fence = gated.submit("main", np.ones(4, "float32"))
        raise ZeroDivisionError  # not waiting for the call, which waits for the gate
    assert not trace.calls[0].ended
    check(trace.events())
    GATES["open"].set()
    fence.result()
    trace.wait()
    assert trace.calls[0].outcome == "done"


@given(st.data())
def test_work_of_gpus_is_in_line_however_it_was_issued(data):
    """Steps issued at once end one after the other; each begins after the one before it, and after what it reads."""
    calls, now = [], 0
    steps = (Step(0, (0,), (1,), "f"), Step(1, (1,), (2,), "g"))
    names = ("stream 0", "stream 1")
    queues = [SimpleNamespace(name=name) for name in names]
    plan = SimpleNamespace(steps=steps, queues=queues, returned_values=[2], function="main")
    ends = [0, 0]
    for number in range(1, data.draw(st.integers(1, 6)) + 1):
        now += data.draw(st.integers(0, 20))
        call = TracedCall(number, now, plan=plan, outcome="done")
        ready = 0
        for index in (0, 1):
            began = max(now, ends[index], ready)
            ready = ends[index] = began + data.draw(st.integers(2, 50))
            call.ran.append(RanStep(index, names[index], now, ready))
        call.ran.append(RanStep(RESULT, "ends", ready, ready + 1))
        call.ended = ready + 2
        call.nbytes = {1: 4, 2: 8}
        calls.append(call)
    for call in serialize_tracks(calls):
        first, second = sorted((ran for ran in call.ran if ran.step >= 0), key=lambda ran: ran.step)
        assert first.end <= second.begin < second.end
    metadata = SimpleNamespace(
        devices=[rh.vm.DeviceSpec('{"kind": "cuda"}', i) for i in (0, 1)], regions=(), dispatches={}
    )
    check(chrome_events(calls, metadata))
