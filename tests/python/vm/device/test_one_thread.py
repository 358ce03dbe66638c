"""A machine of one thread starts no other, though its kernels are cut for several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import time
import numpy as np
import tvm
import relax_hetero as rh

def threads():
    # Threads that have compiled code take a moment to end.
    seen = []
    while len(seen) < 5 or len(set(seen[-5:])) > 1:
        seen.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.05)
    return seen[-1]

target = {{"kind": "llvm", "num-cores": {cores}}}
x = tvm.relax.Var("x", tvm.relax.TensorType((512, 512), "float32"))
builder = tvm.relax.BlockBuilder()
with builder.function("main", [x]):
    with builder.dataflow():
        y = builder.emit_output(tvm.relax.op.matmul(x, x))
    builder.emit_func_output(y)
mod = builder.get()
mod.update_global_info("vdevice", [rh.VDevice(target)])
machine = rh.vm.VirtualMachine(rh.compile(mod))
value = np.ones((512, 512), "float32")
before = threads()
for _ in range(3):
    assert (machine["main"](value).numpy() == 512).all()
print(threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the operating system does not list threads here")
@pytest.mark.parametrize(
    "cores, settings, started", [(1, None, 0), pytest.param(2, "1", 0, marks=pytest.mark.slow), (2, "2", 1)]
)
def test_threads_started_by_calls(cores, settings, started):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TVM_NUM_THREADS", "OMP_NUM_THREADS")
    }
    if settings is not None:
        environment["TVM_NUM_THREADS"] = settings
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(cores=cores)], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == started
