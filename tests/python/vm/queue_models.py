"""Models whose steps tests can hold up, count and make fail, by kernels written in Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T


@I.ir_module
class Pipeline:
    """A kernel written in Python on each of two devices, with work of the library's around them."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

    @R.function
    def main(x: R.Tensor(("n",), "float32", "llvm:0")):
        n = T.int64()
        with R.dataflow():
            a: R.Tensor((n,), "float32", "llvm:0") = R.add(x, x)
            b = R.call_dps_packed("relax_hetero.test.first", (a,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
            c: R.Tensor((n,), "float32", "llvm:1") = R.to_vdevice(b, "llvm:1")
            d = R.call_dps_packed("relax_hetero.test.second", (c,), out_ty=R.Tensor((n,), "float32", "llvm:1"))
            e: R.Tensor((n,), "float32", "llvm:1") = R.add(d, d)
            R.output(e)
        return e

    @R.function
    def one(x: R.Tensor(("n",), "float32", "llvm:0")):
        n = T.int64()
        with R.dataflow():
            y: R.Tensor((n,), "float32", "llvm:0") = R.multiply(x, x)
            R.output(y)
        return y

    @R.function
    def same(x: R.Tensor(("n",), "float32", "llvm:0")):
        return x


def copy(source: tvm.runtime.Tensor, target: tvm.runtime.Tensor) -> None:
    source.copyto(target)


def expected(x):
    """Result of ``Pipeline.main`` if its kernels copy."""
    return x * 4


class Gate:
    """A kernel that counts who is in it, and lets nobody out until it is opened.

    Attributes
    ----------
    inside : int
        Number of calls in the kernel.
    most : int
        Largest number of calls at once.
    """

    def __init__(self) -> None:
        self.inside = self.most = 0
        self._lock = threading.Lock()
        self._entered = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, source: tvm.runtime.Tensor, target: tvm.runtime.Tensor) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self._entered.release()
        assert self._open.wait(30)
        source.copyto(target)
        with self._lock:
            self.inside -= 1

    def wait(self) -> None:
        """Wait until one more call is in the kernel."""
        assert self._entered.acquire(timeout=30)

    def open(self) -> None:
        self._open.set()


# Machines look kernels up once, so the registered function stays and looks up its behaviour here.
_now: dict[str, Callable[..., None]] = {"first": copy, "second": copy}


@tvm.register_global_func("relax_hetero.test.first", override=True)
def _first(source: tvm.runtime.Tensor, target: tvm.runtime.Tensor) -> None:
    _now["first"](source, target)


@tvm.register_global_func("relax_hetero.test.second", override=True)
def _second(source: tvm.runtime.Tensor, target: tvm.runtime.Tensor) -> None:
    _now["second"](source, target)


@contextmanager
def kernels(first: Callable[..., None] = copy, second: Callable[..., None] = copy) -> Iterator[None]:
    """Set what the kernels of `Pipeline` do within the block."""
    before = dict(_now)
    _now.update(first=first, second=second)
    try:
        yield
    finally:
        _now.update(before)
