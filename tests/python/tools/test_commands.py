"""compile, run and explain, from the command line to the result."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result
from onnx import numpy_helper

import relax_hetero as rh
from relax_hetero.display.console import print_table
from relax_hetero.tools import cli, devices

from .conftest import TWO, parsed, save, two_layers

Invoke = Callable[..., Result]


def expected(model: Path, x: np.ndarray) -> np.ndarray:
    weights = {each.name: numpy_helper.to_array(each) for each in onnx.load(str(model)).graph.initializer}
    return np.maximum(x @ weights["a"], 0) @ weights["b"]


def test_help_does_not_import_tvm():
    code = "import sys, relax_hetero.tools.cli; sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    shown = subprocess.run([sys.executable, "-m", "relax_hetero", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "Usage: relax-hetero" in shown.stdout


def test_output_to_a_pipe_whose_encoding_lacks_characters(monkeypatch: pytest.MonkeyPatch):
    """On Windows pipes and files have the encoding of the language; its absence ends no command."""
    pipe = io.TextIOWrapper(io.BytesIO(), "cp1252", newline="\n")
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(cli, "cli", lambda prog_name: print_table("µ →", ["µs"], [["1"]]))
    cli.main()
    pipe.flush()
    assert pipe.buffer.getvalue().startswith("µ ?".encode("cp1252"))


_WITHOUT_EXTRAS = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extras!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
from relax_hetero.tools.cli import cli
print(*cli.commands)
cli()
"""
EXTRAS = {
    "cuda", "cupy", "fastapi", "gguf", "httpx", "jinja2", "onnxruntime", "openai", "pandas", "prometheus_client",
    "pydantic", "ray", "safetensors", "sentencepiece", "starlette", "tokenizers", "torch", "uvicorn",
}  # fmt: skip


def test_the_commands_need_no_extra(model: Path, tmp_path: Path):
    code = _WITHOUT_EXTRAS.replace("{extras!r}", repr(EXTRAS))
    for arguments in (["serve", "--help"], ["compile", str(model), "-o", str(tmp_path / "model.so"), *TWO]):
        shown = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert shown.returncode == 0 and "serve" in shown.stdout, shown.stderr


def test_compile_then_run_then_check(invoke: Invoke, model: Path, tmp_path: Path):
    library = tmp_path / "model.so"
    summary = parsed(invoke("compile", model, "-o", library, *TWO, "--place", "/upper/*=llvm:1", "--json"))
    assert [device["name"] for device in summary["devices"]] == ["llvm:0", "llvm:1"]
    assert summary["bytes"] == library.stat().st_size
    assert set(summary["seconds"]) == {"import", "compile", "export"}

    x = np.random.default_rng(1).standard_normal((2, 3)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "out.npz"
    ran = parsed(
        invoke("run", library, "--input", tmp_path / "x.npy", "--output", out, "--check", "--onnx", model, "--json")
    )
    assert ran["check"]["passed"] and ran["outputs"][0]["name"] == "class"
    assert ran["outputs"][0]["device"] == "cpu:1"
    np.testing.assert_allclose(np.load(out)["class"], expected(model, x), rtol=1e-5, atol=1e-6)


def test_run_an_onnx_file_on_random_inputs(invoke: Invoke, model: Path):
    first, again, other = (parsed(invoke("run", model, "--seed", seed, "--json")) for seed in (1, 1, 2))
    assert first["outputs"] == again["outputs"] != other["outputs"]
    assert first["check"] is None
    shown = invoke("run", model, "--check")
    assert shown.exit_code == 0
    assert "Against ONNX Runtime" in shown.stdout and "class" in shown.stdout


def test_a_device_of_the_model_runs_on_another(invoke: Invoke, model: Path):
    ran = parsed(invoke("run", model, *TWO, "--place", "/upper/*=llvm:1", "--device", "llvm:1=cpu:0", "--json"))
    assert ran["outputs"][0]["device"] == "cpu:0"


def test_a_mismatch_exits_with_1(invoke: Invoke, model: Path, tmp_path: Path):
    other = two_layers()
    doubled = numpy_helper.to_array(other.graph.initializer[0]) * 2
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(doubled, "a"))
    library = tmp_path / "model.so"
    assert invoke("compile", model, "-o", library).exit_code == 0
    result = invoke("run", library, "--check", "--onnx", save(other, tmp_path / "other.onnx"), "--json")
    assert result.exit_code == 1
    assert "differs from ONNX Runtime" in result.stderr
    check = parsed(result)["check"]
    assert not check["passed"] and check["outputs"][0]["wrong"] > 0


def test_a_library_takes_no_options_of_compiling(invoke: Invoke, model: Path, tmp_path: Path):
    library = tmp_path / "model.so"
    assert invoke("compile", model, "-o", library, "--accuracy", "exact", "--checks", "strict").exit_code == 0
    options = [("run", "checks", "strict"), ("run", "accuracy", "fast"), ("explain", "accuracy", "exact")]
    for command, option, value in options:
        result = invoke(command, library, f"--{option}", value)
        assert result.exit_code == 2
        assert f"model.so is compiled already: --{option} {value} goes with an ONNX file" in result.stderr
    assert invoke("run", library, "--accuracy", "default").exit_code == 0


def test_symbolic_dimensions(invoke: Invoke, symbolic_model: Path, tmp_path: Path):
    sized = parsed(invoke("run", symbolic_model, "--shape", "batch=4", "--json"))
    assert sized["outputs"][0]["shape"] == [4, 5]
    library = tmp_path / "model.so"
    assert invoke("compile", symbolic_model, "-o", library).exit_code == 0
    for shape, rows in (("x=7x3", 7), ("batch=3", 3)):
        assert parsed(invoke("run", library, "--shape", shape, "--json"))["outputs"][0]["shape"] == [rows, 5]
    result = invoke("run", library)
    assert result.exit_code == 1
    assert "input 'x' is batchx3: give its sizes (--shape batch=1) or --input" in result.stderr
    result = invoke("run", library, "--shape", "rows=3")
    assert result.exit_code == 1 and "'rows'" in result.stderr


def test_explain_says_which_rule_placed_an_op(invoke: Invoke, model: Path, tmp_path: Path):
    options = [*TWO, "--place", "/upper/*=llvm:1"]
    data = parsed(invoke("explain", model, *options, "--json"))
    assert [(device["name"], device["ops"]) for device in data["devices"]] == [("llvm:0", 2), ("llvm:1", 1)]
    ops = {entry["variable"]: entry for entry in data["entries"] if entry["kind"] == "op"}
    assert ops["/upper/MatMul"]["reason"] == "rule '/upper/*'" and ops["/upper/MatMul"]["device"] == "llvm:1"
    assert ops["/lower/Relu"]["reason"] == "no rule matches: default device"
    (transfer,) = (entry for entry in data["entries"] if entry["kind"] == "transfer")
    assert (transfer["device"], transfer["bytes"]) == ("llvm:1", 2 * 4 * 4)

    library = tmp_path / "model.so"
    assert invoke("compile", model, "-o", library, *options).exit_code == 0
    assert parsed(invoke("explain", library, "--json"))["entries"] == data["entries"]
    shown = invoke("explain", library)
    assert "3 ops on 2 devices, 1 transfer of 32 B in all." in shown.stdout


def test_runs_say_which_device_has_no_op(invoke: Invoke, model: Path):
    shown = invoke("run", model, *TWO, "--place", "*=llvm:0").stdout
    assert "llvm:1 runs no op; for example, '/lower/MatMul' is on llvm:0: rule '*'." in shown


def test_explain_lists_command_buffers(invoke: Invoke, model: Path, tmp_path: Path):
    data = parsed(invoke("explain", model, "--json"))["command_buffers"]
    (region,) = data["regions"]
    assert (region["function"], region["device"], region["runs"]) == ("main", "llvm:0", "host function")
    assert [(slot["name"], slot["nbytes"], slot["access"]) for slot in region["slots"]] == [
        ("x", 2 * 3 * 4, "read"),
        ("/upper/MatMul", 2 * 5 * 4, "write"),
    ]
    assert region["counts"]["kernels"] == len(region["commands"]) == 2 and len(region["directs"]) == 2
    assert data["single_calls"] == []

    library = tmp_path / "model.so"
    assert invoke("compile", model, "-o", library).exit_code == 0
    of_library = parsed(invoke("explain", library, "--json"))["command_buffers"]
    assert all(0 <= index < 3 for index in of_library["regions"][0]["directs"])
    of_library["regions"][0]["directs"] = region["directs"]
    assert of_library == data
    shown = invoke("explain", library, "commands").stdout
    assert "Slots of main_commands" in shown and "slot 0, direct 0" in shown


def test_explain_says_how_things_are_stored_and_why_not(invoke: Invoke, symbolic_model: Path, tmp_path: Path):
    other = json.dumps({"kind": "vulkan"})
    options = ["--vdevice", "llvm", "--vdevice", other, "--place", "/upper/*=vulkan:0"]
    data = parsed(invoke("explain", symbolic_model, *options, "--json"))["encodings"]
    (op,) = data["ops"]
    assert (op["device"], op["op"], op["epilogue"]) == ("llvm:0", "matmul", "relu(x0)")
    weight = next(operand for operand in op["operands"] if operand["role"] == "rhs")
    assert (weight["shape"], weight["bytes_before"], weight["packed"]) == ("3x4", 48, "at compile time")
    assert weight["bytes_after"] > 48 and weight["layout"].startswith("pack<")
    assert [(entry["variable"], entry["device"]) for entry in data["cancelled"]] == [("/upper/MatMul", "vulkan:0")]
    shown = invoke("explain", symbolic_model, *options).stdout
    assert "1 encoded op, 0 encoded transfers, 1 cancelled." in shown and "no resolver for target" in shown

    library = tmp_path / "model.so"
    parsed(invoke("compile", symbolic_model, "-o", library, *TWO, "--json"))
    of_library = parsed(invoke("explain", library, "--json"))["encodings"]
    assert of_library == parsed(invoke("explain", symbolic_model, *TWO, "--json"))["encodings"]
    assert len(of_library["ops"]) == 2 and not of_library["cancelled"]


def test_place_auto_is_the_cost_models_choice(invoke: Invoke, model: Path):
    data = parsed(invoke("explain", model, *TWO, "--place-auto", "--json"))
    reasons = {entry["reason"] for entry in data["entries"] if entry["kind"] == "op"}
    assert all(reason.startswith("auto, ") and " here, " in reason and " on llvm:" in reason for reason in reasons)
    shown = " ".join(invoke("explain", model, *TWO, "--place-auto").stdout.split())
    assert "figures: tables." in shown and "; on one device: llvm:0" in shown
    assert data["placement_estimate"]["objective"] == "latency"
    assert data["placement_estimate"]["seconds"] > 0
    assert parsed(invoke("explain", model, *TWO, "--json"))["placement_estimate"] is None


def test_expectations_of_the_cost_model_stay_with_a_library(invoke: Invoke, model: Path, tmp_path: Path):
    options = [*TWO, "--place-auto", "--objective", "throughput"]
    estimate = parsed(invoke("explain", model, *options, "--json"))["placement_estimate"]
    assert estimate["objective"] == "throughput"
    assert set(estimate["busy_seconds"]) == set(estimate["single_device_seconds"]) == {"llvm:0", "llvm:1"}
    assert estimate["seconds"] == max(estimate["busy_seconds"].values())
    library = tmp_path / "model.so"
    parsed(invoke("compile", model, "-o", library, *options, "--json"))
    assert parsed(invoke("explain", library, "--json"))["placement_estimate"] == estimate
    shown = " ".join(invoke("explain", library).stdout.split())
    assert "Placed for throughput by the cost model: time between calls" in shown and "busy for one call" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vdevice", "llvm", "--vdevice", "gpu"], "gpu"),
        (["--vdevice", "llvm", "--place", "/upper/*=cuda:0"], "cuda"),
        (["--vdevice", "llvm", "--place", "/absent/*=llvm:0"], "matches no node"),
        (["--shape", "y=1x3"], "'y'"),
        (["--shape", "x=1x3x1"], "'x'"),
    ],
)
def test_errors_are_one_line_and_exit_with_1(invoke: Invoke, model: Path, arguments: list[str], message: str):
    result = invoke("explain", model, *arguments)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr and "Traceback" not in result.stderr
    traced = invoke("explain", model, *arguments, "--debug")
    assert traced.exit_code == 1 and "Traceback" in traced.stderr


def test_files_that_cannot_be_read_or_written(invoke: Invoke, model: Path, tmp_path: Path):
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"\xff" * 64)
    assert "is not an ONNX model" in invoke("run", junk).stderr
    (tmp_path / "junk.so").write_bytes(b"\xff" * 64)
    for arguments in (
        ["run", junk],
        ["run", tmp_path / "junk.so"],
        ["compile", model, "-o", tmp_path / "no" / "folder" / "m.so"],
        ["run", model, "--output", tmp_path / "no" / "folder" / "out.npz"],
        ["run", model, "--input", junk],
    ):
        result = invoke(*arguments)
        assert result.exit_code == 1 and result.stderr.startswith("error: "), result.output


def test_wrong_usage_exits_with_2(invoke: Invoke, model: Path, tmp_path: Path):
    library = tmp_path / "model.so"
    library.touch()
    for arguments in (
        ["run", tmp_path / "absent.onnx"],
        ["run", model, "--no-such-option"],
        ["run", library, "--check"],
        ["run", library, "--vdevice", "llvm"],
        ["run", library, "--accuracy", "fast"],
        ["explain", library, "--accuracy", "exact"],
        ["run", model, "--device", "llvm"],
        ["compile", model],
        ["explain", model, "--place", "nothing"],
        ["bench", model, "--rounds", "0"],
        ["bench", model, "--seed", "-1"],
        ["run", model, "--seed", "-1"],
        ["run", model, "--check", "--rtol", "-1"],
        ["no-such-command"],
    ):
        assert invoke(*arguments).exit_code == 2, arguments


def test_inputs_are_not_overwritten_by_outputs(invoke: Invoke, model: Path, tmp_path: Path):
    library = tmp_path / "model.so"
    assert invoke("compile", model, "-o", library).exit_code == 0
    link = tmp_path / "link.npz"
    link.symlink_to(library)
    before = model.read_bytes(), library.read_bytes()
    for arguments in (
        ["compile", model, "-o", model],
        ["run", model, "--output", model],
        ["run", library, "--output", link],
        ["run", library, "--check", "--onnx", model, "--output", model],
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2 and "is the model itself" in result.stderr, result.output
    assert (model.read_bytes(), library.read_bytes()) == before


def test_outputs_replace_a_file_that_is_mapped(invoke: Invoke, model: Path, tmp_path: Path):
    library = tmp_path / "model.so"
    assert invoke("compile", model, "-o", library).exit_code == 0
    executable = rh.load(library)
    assert invoke("run", model, "--output", library).exit_code == 0
    actual = rh.vm.VirtualMachine(executable)["main"](np.ones((2, 3), "float32"))
    np.testing.assert_allclose(actual.numpy(), expected(model, np.ones((2, 3), "float32")), rtol=1e-5)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.so"]


def test_a_library_is_signed_and_verified(invoke: Invoke, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library, key, other = tmp_path / "model.bin", tmp_path / "key", tmp_path / "other"
    key.write_bytes(b"a key of more than sixteen bytes\n")
    other.write_bytes(b"another key, also of enough bytes")
    assert invoke("compile", model, "-o", library, "--key-file", key).exit_code == 0
    assert invoke("run", library, "--key-file", key).exit_code == 0
    monkeypatch.setenv("RELAX_HETERO_KEY_FILE", str(other))
    for command in ("run", "explain"):
        refused = invoke(command, library)
        assert refused.exit_code == 1 and "its signature is not by the key given" in refused.stderr
    other.write_bytes(b"short")
    assert "a key has at least 16 bytes" in invoke("run", library).stderr


def test_limits_of_the_import(invoke: Invoke, model: Path):
    assert "expected at most 1." in invoke("explain", model, "--max-nodes", "1").stderr
    assert invoke("explain", model, "--max-nodes", "1000", "--max-computed", "1.5G", "--summary").exit_code == 0
    assert "not a number of bytes" in invoke("explain", model, "--max-computed", "much").stderr


def test_names_do_not_command_the_terminal(invoke: Invoke, model: Path, tmp_path: Path):
    proto = onnx.load(str(model))
    proto.graph.node[0].name = "red\x1b[31m"
    onnx.save(proto, tmp_path / "red.onnx")
    shown = invoke("explain", tmp_path / "red.onnx", "ops")
    assert "red\\x1b[31m" in shown.stdout and "\x1b" not in shown.stdout
    proto.graph.node[0].op_type = "Unknown"
    proto.graph.node[0].domain = "my"
    proto.opset_import.add(domain="my", version=1)
    onnx.save(proto, tmp_path / "red.onnx")
    failed = invoke("explain", tmp_path / "red.onnx")
    assert "red\\x1b[31m" in failed.stderr and "\x1b" not in failed.stderr


def test_check_reports_unsupported_nodes(invoke: Invoke, model: Path, tmp_path: Path):
    good = invoke("check", model, *TWO)
    assert good.exit_code == 0 and "all supported" in good.stdout and "llvm:0, llvm:1" in good.stdout

    bad = two_layers()
    bad.graph.node[1].domain = "acme"
    bad.opset_import.add(domain="acme", version=1)
    path = save(bad, tmp_path / "bad.onnx")
    shown = invoke("check", path)
    assert shown.exit_code == 1 and "no converter takes this op" in shown.stdout
    result = invoke("check", path, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and not report["supported"]
    assert [node["domain"] for node in report["nodes"] if node["status"] == "refused"] == ["acme"]
    assert invoke("check", path, *TWO, "--place", "*=llvm:1").exit_code == 2

    (tmp_path / "ops.py").write_text(
        "import relax_hetero as rh\n"
        "rh.frontend.register_op('acme', 'Relu', infer=lambda node: node.tensor(0).ty)(lambda x: x * (x > 0))\n"
    )
    with_ops = ("--ops", tmp_path / "ops.py")
    try:
        assert invoke("check", path, *with_ops).exit_code == 0
        library = tmp_path / "bad.so"
        assert invoke("compile", path, "-o", library, *with_ops).exit_code == 0
        rh.frontend.unregister_op("acme", "Relu")
        failed = invoke("run", library)
        assert failed.exit_code == 1 and "register_numpy_op('acme', 'Relu'" in failed.stderr
        assert invoke("run", library, *with_ops).exit_code == 0
    finally:
        rh.frontend.unregister_op("acme", "Relu")
    for name in ("nobodys.module", tmp_path / "none.py"):
        wrong = invoke("check", path, "--ops", name)
        assert wrong.exit_code == 2 and f"--ops {name}" in wrong.stderr


@pytest.mark.parametrize(("peers", "text"), [([], "none: NCCL sums over a mesh"), (["cuda:1"], "cuda:1")])
def test_devices_shows_which_gpus_reach_each_other(peers: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    gpu = {"model": "GPU", "target": '{"kind": "cuda"}', "cores": 1, "instructions": "", "memory": 1, "peers": peers}
    devices._print_devices([{"name": "cuda:0", **gpu}])
    assert "Peer access" not in capsys.readouterr().out  # one GPU
    devices._print_devices([{"name": f"cuda:{index}", **gpu} for index in range(2)])
    assert text in capsys.readouterr().out.partition("Peer access")[2]
