"""Programs of small modules, cut by hand, and what they compute."""

from __future__ import annotations

import numpy as np
from tvm.script import ir as I
from tvm.script import relax as R

from relax_hetero.cluster import CALL, CallPlan, HostStep, Program, Source


@I.ir_module
class First:
    @R.function
    def main_0(x: R.Tensor(("n", 4), "float32")):
        with R.dataflow():
            y = R.add(x, R.const(1.0, "float32"))
            z = R.multiply(x, R.const(2.0, "float32"))
            R.output(y, z)
        return (y, z)

    @R.function
    def main_2(y: R.Tensor(("n", 4), "float32"), w: R.Tensor(("n", 4), "float32")):
        with R.dataflow():
            v = R.add(y, w)
            R.output(v)
        return v


@I.ir_module
class Second:
    @R.function
    def main_1(z: R.Tensor(("n", 4), "float32")):
        with R.dataflow():
            w = R.multiply(z, z)
            R.output(w)
        return w


CHAIN = CallPlan(
    steps=(
        HostStep("a", "main_0", (Source(CALL, 0),), 2),
        HostStep("b", "main_1", (Source(0, 1),), 1),
    ),
    result=(Source(1, 0), Source(0, 0)),
    input_names=("x",),
)

ROUND_TRIP = CallPlan(
    steps=(*CHAIN.steps, HostStep("a", "main_2", (Source(0, 0), Source(1, 0)), 1)),
    result=Source(2, 0),
    input_names=("x",),
)


def program() -> Program:
    """``chain(x) -> (4 x x, x + 1)`` over a and b, and ``round(x) -> x + 1 + 4 x x`` over a, b and a again."""
    return Program({"a": First, "b": Second}, {"main": CHAIN, "round": ROUND_TRIP})


def expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The results of `CHAIN`."""
    doubled = x * np.float32(2)
    return doubled * doubled, x + np.float32(1)
