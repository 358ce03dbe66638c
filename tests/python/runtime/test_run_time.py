"""Functions of relax-hetero-runtime: load, run and look at files. test_runtime_wheel.py runs these tests there.

RELAX_HETERO_RUNTIME_FILES names a folder with the files of runtime_files.py; without it they are compiled.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest

import relax_hetero as rh

KEY = b"signed with 16 bytes"
FILES = os.environ.get("RELAX_HETERO_RUNTIME_FILES", "")
pytestmark = [] if FILES else [pytest.mark.slow]  # with the compiler other tests cover the same


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if FILES:
        return Path(FILES)
    from runtime.runtime_files import write_files

    path = tmp_path_factory.mktemp("files")
    write_files(path)
    return path


@pytest.fixture
def machine(folder):
    return rh.vm.VirtualMachine(rh.load(folder / "decoder.so", key=KEY))


def arguments():
    rows = (np.linspace(-1, 1, 40, dtype="float32"), np.linspace(0, 3, 40, dtype="float32"))
    return [array.reshape(5, 8) for array in rows]


def check(folder, name, results):
    expected = np.load(folder / f"{name}.npz")
    for actual, key in zip(results, expected.files, strict=True):
        np.testing.assert_array_equal(
            np.asarray(actual if isinstance(actual, np.ndarray) else actual.numpy()), expected[key]
        )


def test_there_is_no_compiler_where_there_should_be_none():
    import tvm

    assert tvm.base._RUNTIME_ONLY == bool(FILES)
    if FILES:
        assert not any("libtvm_compiler" in line for line in Path("/proc/self/maps").read_text().splitlines())
        with pytest.raises(
            rh.HeteroError, match=r"relax_hetero.compile needs TVM's compiler: found TVM's runtime only"
        ):
            rh.compile


def test_two_devices(folder, machine):
    check(folder, "decoder", machine["main"](*arguments()))
    assert [device.index for device in machine.devices] == [0, 1]
    assert {dispatch.device for dispatch in machine.executable.metadata.dispatches.values()} >= {0, 1}


def test_loops(folder):
    machine = rh.vm.VirtualMachine(rh.load(folder / "loop.so", verify=True))
    x = np.array([1, 0, 2], "float32")
    check(folder, "loop", machine["main"](np.array(1 << 40), x, np.array(100, "float32")))


def test_submitted_calls(folder, machine, tmp_path):
    with machine.trace() as trace:
        fences = [machine.submit("main", *arguments()) for _ in range(3)]
        for fence in fences:
            check(folder, "decoder", fence.result())
    trace.save(tmp_path / "trace.json")
    assert all(name in (tmp_path / "trace.json").read_text() for name in ("llvm:0", "llvm:1"))


def test_results_into_buffers(folder, machine):
    out = np.empty((5, 8), "float32"), np.empty((5, 8), "float32")
    machine["main"](*arguments(), out=out)
    check(folder, "decoder", out)


def test_wrong_arguments(machine):
    cache, row = arguments()
    with pytest.raises(rh.BindingError, match="n is 5"):
        machine["main"](cache, row[:3])
    with pytest.raises(rh.BuildError, match="found no signature"):
        rh.load(__file__, key=KEY)


def test_profiles_and_explanations(machine, capsys):
    assert {row.device for row in machine.profile("main", *arguments()).rows} >= {"llvm:0", "llvm:1"}
    machine.executable.explain()
    assert "llvm:1" in capsys.readouterr().out


def test_language_models(folder):
    model, tokenizer = rh.llm.load(folder / "language_model")
    with rh.llm.Engine(model, tokenizer) as engine:
        deltas = engine.submit([1, 2, 3], rh.llm.SamplingParams(temperature=0, max_tokens=5))
        tokens = [token for delta in deltas for token in delta.tokens]
    assert tokens == np.load(folder / "tokens.npy").tolist()


def test_serving(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "relax_hetero", "serve", str(folder / "language_model"), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None:  # until it listens
                with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                    break
                time.sleep(0.2)
            request = {"model": "language_model", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}
            headers = {"Content-Type": "application/json"}
            url = f"http://127.0.0.1:{port}/v1/completions"
            with urlopen(Request(url, json.dumps(request).encode(), headers), timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 5
        finally:
            server.terminate()


def test_commands(folder):
    for command, text in (
        (["--version"], "relax-hetero"),
        (["explain", str(folder / "decoder.so")], "llvm:1"),
        (["doctor"], "ok"),
    ):
        done = subprocess.run([sys.executable, "-m", "relax_hetero", *command], capture_output=True, text=True)
        assert text in done.stdout, done.stderr
