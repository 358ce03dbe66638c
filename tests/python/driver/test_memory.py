"""Packed weights are kept once: in the file, and in a process that maps it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

import relax_hetero as rh
from relax_hetero.driver.compile import memory_plan_of
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.transform.pipeline import pipeline_steps

MEMORY = Path(__file__).resolve().parents[3] / "apps" / "bench" / "memory.py"
# Bytes of code, threads and the runtime's own data, besides a model's weights.
FIXED = 12 << 20


def test_a_fresh_process_holds_the_weights_once():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, MEMORY, "--layers", "6", "--width", "2048", "--engine", "relax_hetero", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(done.stdout)
    weights = figures["weights"]
    assert weights == 6 * (2048 * 2048 + 2048) * 4
    assert figures["finite"]
    assert weights <= figures["exported"] < weights + FIXED
    assert figures["loading"] < FIXED  # mapped, and not touched yet
    assert weights // 2 < figures["running"] < 1.1 * weights + FIXED
    assert figures["exporting"] < 2.5 * weights + 10 * FIXED  # the compiler itself, too


def stack(x_rows, weights):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((x_rows, weights[0].shape[0]), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for weight in weights:
                value = builder.emit(relax.op.matmul(value, relax.const(weight)))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return builder.get()


def model_constants(exe):
    """An executable's constants, without the tables of addresses that machines fill."""
    return [t for t, spec in zip(exe.constants, exe.metadata.constants, strict=True) if spec.addresses is None]


def test_a_weight_used_twice_is_kept_once():
    weight = tvm.runtime.tensor(np.random.default_rng(0).random((256, 256), dtype="float32") - 0.5)
    exe = rh.compile(stack(16, [weight] * 3))
    assert sum(int(np.prod(tuple(t.shape))) for t in model_constants(exe)) == 256 * 256
    x = np.random.default_rng(1).random((16, 256), dtype="float32")
    w = weight.numpy().astype("float64")
    np.testing.assert_allclose(rh.vm.VirtualMachine(exe)["main"](x).numpy(), x @ w @ w @ w, rtol=1e-4, atol=1e-4)


def test_sources_of_packed_weights_are_not_in_the_executable():
    weights = [tvm.runtime.tensor(np.full((256, 256), i, "float32")) for i in range(1, 4)]
    exe = rh.compile(stack(16, weights))
    addresses = {tensor.data_ptr() for tensor in model_constants(exe)}
    assert len(addresses) == 3 and not addresses & {weight.data_ptr() for weight in weights}


def test_the_plan_of_a_module_counts_weights_of_graphs():
    """Without a GPU: nothing is linked."""
    gpu = rh.VDevice({"kind": "cuda", "arch": "sm_90a"})
    mod = stack(4, [np.ones((96, 96), "float32"), np.full((96, 96), 2, "float32")])
    mod = with_vdevices(mod, [gpu])
    for step in pipeline_steps()[:-1]:
        mod = step.run(mod)
    weights = memory_plan_of(mod).weights(0)
    assert 2 * 96 * 96 * 4 <= weights < 2 * 96 * 96 * 4 + 8192
