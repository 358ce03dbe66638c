"""The pinned TVM and tvm_ffi fit together: with tvm_ffi 0.1.15 what runs here ends the process by a signal."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

SAVE_JSON = """
import tvm
from tvm import relax
x = relax.Var("x", relax.TensorType((2, 3), "float32", relax.VDevice("llvm")))
mod = tvm.IRModule.from_expr(relax.Function([x], relax.SeqExpr([], x), x.ty))
tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(mod)), mod)
"""

TENSORIZE = """
import tvm
from tvm import te
from tvm.script import tirx as T

@T.prim_func(s_tir=True)
def described(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    with T.sblock("root"):
        T.reads(a[0:4])
        T.writes(b[0:4])
        for i in range(4):
            with T.sblock("b"):
                v = T.axis.remap("S", [i])
                b[v] = a[v] + T.float32(1)

@T.prim_func(s_tir=True)
def implemented(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    with T.sblock("root"):
        T.reads(a[0:4])
        T.writes(b[0:4])
        b[T.Ramp(0, 1, 4)] = a[T.Ramp(0, 1, 4)] + T.Broadcast(T.float32(1), 4)

tvm.s_tir.TensorIntrin.register("add_one_to_four", described, implemented)
a = te.placeholder((16,), "float32", name="a")
b = te.compute((16,), lambda i: a[i] + tvm.tirx.const(1, "float32"), name="b")
schedule = tvm.s_tir.Schedule(te.create_prim_func([a, b]))
outer, inner = schedule.split(schedule.get_loops(schedule.get_sblock("b"))[0], [None, 4])
schedule.tensorize(inner, "add_one_to_four")
assert "T.Broadcast" in schedule.mod.script()
"""


def test_installed_versions_are_the_pinned_ones():
    assert version("apache-tvm") == "0.27.0.post1"
    assert version("apache-tvm-ffi").startswith("0.1.14")


@pytest.mark.parametrize("code", [SAVE_JSON, TENSORIZE], ids=["save_json", "tensorize"])
def test_process_survives(tmp_path, code):
    script = tmp_path / "script.py"  # TVMScript reads its own source, so it must be a file
    script.write_text(code)
    done = subprocess.run([sys.executable, script], env=dict(os.environ), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
