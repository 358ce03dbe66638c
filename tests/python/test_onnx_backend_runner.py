"""The runner of ONNX's backend suite: comparing outputs, dealing nodes out, and surviving crashes."""

import json
import pathlib
import sys

import ml_dtypes
import numpy as np
import onnx
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "apps" / "onnx_backend"))

from conformance import pool, store  # noqa: E402
from conformance.backends import (  # noqa: E402
    BUILD_ONLY_VARIABLE,
    GPU_VARIABLE,
    OneDeviceBackend,
    TwoDeviceBackend,
    deal_out,
)
from conformance.cases import load_case, mismatch  # noqa: E402
from conformance.outcome import CRASHED, NOT_RUN, PASSED, REFUSED, Outcome, run_case  # noqa: E402
from conformance.report import markdown  # noqa: E402

WORKER = """
import json, os, sys, time
for line in sys.stdin:
    name = line.strip()
    if name == "dies":
        sys.stderr.write("last words"); sys.stderr.flush(); os.abort()
    if name == "hangs":
        time.sleep(60)
    answer = dict(name=name, status="passed", ops=[], detail="", seconds=0.0, where="")
    sys.stdout.write(json.dumps(answer) + "\\n"); sys.stdout.flush()
"""


@pytest.mark.parametrize(
    ("got", "problem"),
    [
        ([np.float32([1, np.nan, np.inf])], None),
        ([np.float32([1.0005, np.nan, np.inf])], None),
        ([np.float32([1.01, np.nan, np.inf])], "1 of 3 values differ"),
        ([np.float32([1, 2, np.inf])], "1 of 3 values differ"),
        ([np.float64([1, np.nan, np.inf])], "dtype float64"),
        ([np.float32([[1, np.nan, np.inf]])], "shape"),
        ([], "0 outputs"),
    ],
)
def test_outputs_are_compared_as_onnx_does(got, problem):
    message = mismatch([np.float32([1, np.nan, np.inf])], got, 1e-3, 1e-7)
    assert message is None if problem is None else problem in str(message)


def test_bfloat16_has_its_own_tolerance():
    want = np.array([1, 2], ml_dtypes.bfloat16)
    assert mismatch([want], [want * want.dtype.type(1.01)], 1e-3, 1e-7) is None
    assert mismatch([want], [want * want.dtype.type(1.1)], 1e-3, 1e-7) is not None


def test_nodes_are_dealt_out_in_turn_from_the_second_device():
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) '
        "{ a = Relu(x) b = Tanh(a) c = Exp(b) y = Neg(c) }"
    )
    named, placement = deal_out(model)
    assert placement == {f"node{index}": f"vdevice:{1 - index % 2}" for index in range(4)}
    assert not any(node.name for node in model.graph.node)
    assert [node.name for node in named.graph.node] == list(placement)
    rep = TwoDeviceBackend.prepare(model)
    entries = rep.executable.metadata.placement
    assert {entry["device"] for entry in entries if entry["kind"] == "op"} == {"llvm:0", "llvm:1"}
    x = np.float32([-1, 1])
    (want,) = OneDeviceBackend.prepare(model).run([x])
    np.testing.assert_array_equal(rep.run([x])[0], want)


def test_a_crash_and_a_hang_cost_one_case_each(monkeypatch):
    monkeypatch.setattr(pool, "START_SECONDS", 0.0)
    worker = pool.Worker([sys.executable, "-c", WORKER], timeout=3.0)
    try:
        outcomes = [worker.run(name) for name in ("one", "dies", "two", "hangs", "three")]
    finally:
        worker.close()
    assert [outcome.status for outcome in outcomes] == [PASSED, CRASHED, PASSED, CRASHED, PASSED]
    assert "SIGABRT" in outcomes[1].detail and "last words" in outcomes[1].detail
    assert "no answer within 3 s" in outcomes[3].detail


def test_a_worker_that_ended_by_itself_is_started_again():
    once = "import json, sys; name = sys.stdin.readline().strip(); answer = dict(name=name, status='passed', ops=[])"
    worker = pool.Worker([sys.executable, "-c", once + "; print(json.dumps(answer))"], timeout=30.0)
    try:
        for name in ("one", "two"):
            assert worker.run(name).status == PASSED
            worker._process.wait()
    finally:
        worker.close()


def test_gpu_configurations_with_a_cpu_in_place_of_the_gpu(monkeypatch):
    monkeypatch.setenv(GPU_VARIABLE, "llvm")
    assert [run_case("test_add", configuration).status for configuration in "de"] == [PASSED, PASSED]


def test_cases_are_compiled_for_an_absent_gpu(monkeypatch):
    monkeypatch.setenv(GPU_VARIABLE, '{"kind": "cuda", "arch": "sm_90"}')
    monkeypatch.setenv(BUILD_ONLY_VARIABLE, "1")
    outcome = run_case("test_add", "d")
    assert (outcome.status, outcome.detail) == (PASSED, "compiled, not run")


def test_the_last_run_of_a_case_counts_and_a_torn_line_is_dropped(tmp_path):
    store.append(tmp_path, "b", Outcome("test_add", REFUSED, ["Add"]))
    store.append(tmp_path, "b", Outcome("test_add", PASSED, ["Add"]))
    with store.path_of(tmp_path, "b").open("a") as file:
        file.write(json.dumps({"name": "test_sub"})[:-3])
    assert {name: outcome.status for name, outcome in store.read(tmp_path, "b").items()} == {"test_add": PASSED}


def test_stock_is_not_run_on_sequences():
    name = "test_sequence_insert_at_back"
    assert not load_case(name).has_only_tensors
    assert run_case(name, "a").status == NOT_RUN
    assert run_case(name, "b").status == PASSED


def test_an_op_whose_definition_has_a_loop():
    """The nodes of the definition belong to the one node, wherever it is placed."""
    for configuration in "bc":
        assert run_case("test_linear_attention_delta", configuration).status == PASSED


def test_the_document_counts_what_is_lost():
    stock = {"test_add": Outcome("test_add", PASSED, ["Add"])}
    ours = {"test_add": Outcome("test_add", REFUSED, ["Add"], "FrontendError: Add node 'a': no")}
    text = markdown({"a": stock, "b": ours})
    assert "Of what (a) passes, (b) loses 1" in text
    assert "Add (1)" in text
    assert "`dft_inverse*`: within 1e-06" in text and "`bernoulli*`" in text
