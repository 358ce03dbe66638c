"""memory_limit=: calls that would exceed it are refused by name, before anything runs."""

from functools import partial

import numpy as np
import pytest
import tvm
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.vm.device.memory_limit import MAX_BYTES, PoolWatch, bytes_of_text
from relax_hetero.vm.device.tensors import empty

W = np.ones((64, 128), "float32")  # 32,768 bytes


@ir_module("llvm", "llvm:1")
class Mod:
    @T.prim_func(private=True, s_tir=True)
    def twice(a: T.handle, b: T.handle):
        n = T.int64()
        A = T.match_buffer(a, (n, 128), "float32")
        B = T.match_buffer(b, (n, 128), "float32")
        for i, j in T.grid(n, 128):
            with T.sblock("twice"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] + A[vi, vj]

    @R.function
    def main(x: R.Tensor(("n", 64), "float32", "llvm:0")) -> R.Tensor(("n", 128), "float32", "llvm:1"):
        cls = Mod
        n = T.int64()
        with R.dataflow():
            y: R.Tensor((n, 128), "float32", "llvm:0") = R.matmul(x, R.const(W))
            a = R.call_tir(cls.twice, (y,), out_ty=R.Tensor((n, 128), "float32", "llvm:0"))
            moved: R.Tensor((n, 128), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
            z = R.call_tir(cls.twice, (moved,), out_ty=R.Tensor((n, 128), "float32", "llvm:1"))
            R.output(z)
        return z

    @R.function
    def fixed(x: R.Tensor((1000, 128), "float32", "llvm:1")) -> R.Tensor((1000, 128), "float32", "llvm:1"):
        with R.dataflow():
            y = R.exp(x)
            R.output(y)
        return y


@pytest.fixture(scope="module")
def exe():
    return rh.compile(Mod)


def test_weights_and_functions_of_known_sizes_are_checked_when_the_machine_is_made(exe):
    with pytest.raises(
        rh.MemoryLimitError, match=r"function 'fixed' needs 2,048,000 bytes on llvm:1, found a limit of 1,"
    ):
        rh.vm.VirtualMachine(exe, memory_limit={"llvm:1": "1MB"})
    # One call at a time: a result of 512,000 bytes.
    rh.vm.VirtualMachine(exe, memory_limit={"llvm:1": "0.512MB"}, max_in_flight=1)
    with pytest.raises(
        rh.MemoryLimitError, match=r"function 'fixed' needs 32,8.. bytes on llvm:0.*: 32,8.. for weights"
    ):
        rh.vm.VirtualMachine(exe, memory_limit={0: 30_000, 1: "1GiB"})


def test_symbolic_sizes_are_checked_by_each_call(exe):
    # Two calls under way have what llvm:1 reads of each.
    weights = exe.memory_plan.weights(0)
    vm = rh.vm.VirtualMachine(exe, memory_limit={"vdevice:0": weights + 2 * 100 * 512}, max_in_flight=2)
    small, large = (np.random.default_rng(0).random((n, 64), "float32") for n in (100, 101))
    for _ in range(3):
        for x in (small, small[:7]):
            np.testing.assert_allclose(vm["main"](x).numpy(), 4 * x @ W, rtol=1e-5)
        with pytest.raises(rh.MemoryLimitError, match=r"'main' with n = 101 needs .* bytes on llvm:0, found a limit"):
            vm["main"](large)
        with pytest.raises(rh.MemoryLimitError, match="n = 101"):
            vm.submit("main", large)
        np.testing.assert_allclose(vm.submit("main", small).result().numpy(), 4 * small @ W, rtol=1e-5)


def test_the_pool_keeps_nothing_of_other_extents(exe, monkeypatch):
    cleared = []
    for name in ("clear_pools", "release_pinned"):
        monkeypatch.setattr(f"relax_hetero.vm.device.memory_limit.{name}", partial(cleared.append, name))
    vm = rh.vm.VirtualMachine(exe, memory_limit="1GB")
    for n in (3, 3, 4, 4, 3):
        vm["main"](np.zeros((n, 64), "float32"))
    assert cleared == 3 * ["clear_pools", "release_pinned"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(1, 1), ("17", 17), ("2 kB", 2000), ("512MB", 512_000_000), ("1.5 GiB", 3 << 29), ("1tib", 1 << 40)],
)
def test_numbers_of_bytes(text, nbytes):
    assert bytes_of_text(text, "x") == nbytes


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "", "MB", "5 apples", "-3MB", "1e9", None])
def test_malformed_numbers_of_bytes(exe, bad):
    with pytest.raises(rh.BindingError, match="is .*, expected a positive number of bytes, or text like '512MB'"):
        bytes_of_text(bad, "memory_limit")
    if bad is not None:
        with pytest.raises(rh.BindingError, match=r"memory_limit\['llvm'\] is"):
            rh.vm.VirtualMachine(exe, memory_limit={"llvm": bad})


def test_an_absent_device_is_refused(exe):
    with pytest.raises(rh.BindingError, match="the manifest has no device 'cuda'"):
        rh.vm.VirtualMachine(exe, memory_limit={"cuda": "1GB"})


@pytest.mark.parametrize("command_buffers", [True, False])
def test_upper_bounds_plan_storage_and_arenas_and_are_kept_to(command_buffers):
    @ir_module({"kind": "llvm", "num-cores": 1})
    def Bounded(x: R.Tensor(("n", 64), "float32", "llvm:0")):
        R.func_attr({"tir_var_upper_bound": {"n": 100}})
        with R.dataflow():
            h = R.nn.relu(R.matmul(x, R.const(W)))
            s = R.cumsum(R.nn.softmax(h), axis=0)
            r = R.matmul(R.permute_dims(s), R.nn.silu(R.matmul(R.nn.softmax(h), R.const(W.T))))
            R.output(r)
        return r

    exe = rh.compile(Bounded, command_buffers=command_buffers)
    (memory,) = exe.metadata.memory
    assert memory.storages and all(isinstance(storage.nbytes, int) for storage in memory.storages)
    assert ("arena" in {storage.use for storage in memory.storages}) == command_buffers
    assert (
        exe.memory_plan.at().sizes == {"n": 100} and exe.memory_plan.at().lower_bound <= exe.memory_plan.at().transient
    )
    vm = rh.vm.VirtualMachine(exe)
    for n in (100, 1, 37):
        x = np.random.default_rng(n).random((n, 64), "float32") / 64
        h = np.maximum(x.astype("float64") @ W, 0)
        p = np.exp(h - h.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        q = p @ W.T
        np.testing.assert_allclose(vm["main"](x).numpy(), np.cumsum(p, 0).T @ (q / (1 + np.exp(-q))), rtol=1e-4)
        with pytest.raises(
            rh.BindingError, match=r"n is 101 by argument 'x' of 'main' dimension 0, expected at most 100"
        ):
            vm["main"](np.zeros((101, 64), "float32"))


def test_donated_arguments_do_not_empty_the_pool():
    """A cache of a language model, an argument and a result of each call, is larger than the pool may grow."""
    watch = PoolWatch()
    cache, logits = (empty((count,), "uint8", tvm.cpu(0)) for count in (MAX_BYTES + 1, 1000))
    for extents in range(3):
        watch.note(extents, ([cache], (logits, cache)))
    assert watch.epoch == 0
    watch.note(3, ([logits], cache))
    assert watch.epoch == 1
