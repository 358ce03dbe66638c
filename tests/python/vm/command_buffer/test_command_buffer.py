"""Command buffers recorded by hand: what runs, how often, on which memory, with which numbers."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from vm.command_kernels import Kernels, floats

COMPILED_AND_WALKED = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "walked"])


@pytest.fixture(scope="module")
def vm():
    return rh.vm.VirtualMachine(rh.compile(Kernels))


def scaling(vm, **options):
    """Slot 0 times parameter 0, into slot 1."""
    cb = rh.vm.CommandBuffer(vm, slots=2, parameters=1, **options)
    cb.begin()
    cb.dispatch("scale", 1, [cb.slot(0), cb.slot(1)], {"n": 16, "factor": cb.parameter(0)})
    return cb


@COMPILED_AND_WALKED
def test_one_recording_with_other_memory_and_other_numbers(vm, compiled):
    cb = scaling(vm)
    cb.end(compiled)
    for seed in range(3):
        x, out = floats(16, seed), np.full(20, np.nan, "float32")
        submission = cb.submit([x, out], [1.5 + seed])
        submission.wait()
        assert submission.done()
        np.testing.assert_array_equal(out[:16], x * np.float32(1.5 + seed))
        assert np.isnan(out[16:]).all()


@COMPILED_AND_WALKED
def test_a_table_sees_memory_as_it_is_when_submitted(vm, compiled):
    cb = scaling(vm)
    cb.end(compiled)
    x, out = floats(16, 1), np.zeros(16, "float32")
    table = cb.bind({0: x, 1: out})
    cb.submit(table, [2])
    x[:] = floats(16, 2)
    cb.submit(table, [3])
    np.testing.assert_array_equal(out, x * np.float32(3))


@COMPILED_AND_WALKED
def test_direct_and_indirect_references_in_one_dispatch(vm, compiled):
    w, x, out = floats(32, 3), floats(20, 4), np.full(64, 7, "float32")
    cb = rh.vm.CommandBuffer(vm, slots=2)
    cb.begin()
    buffer = cb.buffer(w.copy(), offset=64)
    cb.dispatch("add", 1, [cb.slot(0, offset=16), buffer, cb.slot(1, offset=32, length=64)])
    cb.copy(cb.buffer(w, length=8), cb.slot(1))
    cb.end(compiled)
    cb.submit([x, (out, 128)])  # the recording's offset counts from the binding's
    expected = np.full(64, 7, "float32")
    expected[40:56] = x[4:] + w[16:]
    expected[32:34] = w[:2]
    np.testing.assert_array_equal(out, expected)


@COMPILED_AND_WALKED
def test_symbolic_extents_and_offsets_travel_as_parameters(vm, compiled):
    cb = rh.vm.CommandBuffer(vm, slots=2, parameters=2)
    cb.begin()
    n, row = cb.parameter(0), cb.parameter(1)
    cb.dispatch("scale", 1, [cb.slot(0, offset=row * 4), cb.slot(1)], {"n": n, "factor": 2})
    cb.fill(cb.slot(1, offset=4 * n, length=(n // 2 + n % 2) * 4), -1.0, "float32")
    cb.end(compiled)
    x = floats(10, 5)
    for n_now, row_now in ((4, 6), (0, 3), (5, 0)):
        out = np.full(16, 9, "float32")
        cb.submit([x, out], [n_now, row_now])
        expected = np.full(16, 9, "float32")
        expected[:n_now] = x[row_now : row_now + n_now] * 2
        expected[n_now : n_now + (n_now + 1) // 2] = -1
        np.testing.assert_array_equal(out, expected)
    with pytest.raises(rh.BindingError, match=r"slot 0 is bound to 40 bytes, expected at least 44 = .*parameter_1"):
        cb.submit([x, np.zeros(16, "float32")], [4, 7])
    with pytest.raises(rh.BindingError, match="extent of tensor 'A' of kernel 'scale' along axis 0 is -1"):
        cb.submit([x, np.zeros(16, "float32")], [-1, 7])


@COMPILED_AND_WALKED
@pytest.mark.parametrize("grid", [(4, 3, 2), (2, 3), (3,), 1, (0, 3, 2), (4, 3, 0)])
def test_workgroups_are_counted_through(vm, compiled, grid):
    cb = rh.vm.CommandBuffer(vm, slots=1)
    cb.begin()
    cb.dispatch("mark", grid, [cb.slot(0)])
    cb.end(compiled)
    marks = np.zeros((4, 3, 2), "int32")
    cb.submit([marks])
    x, y, z = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
    expected = np.zeros((4, 3, 2), "int32")
    expected[:x, :y, :z] = 1
    np.testing.assert_array_equal(marks, expected)


@COMPILED_AND_WALKED
def test_counts_that_an_earlier_kernel_writes(vm, compiled):
    cb = rh.vm.CommandBuffer(vm, slots=3)
    cb.begin()
    cb.dispatch("count_positive", 1, [cb.slot(0), cb.slot(1)])
    cb.barrier()
    cb.dispatch_indirect("mark", cb.slot(1), [cb.slot(2)])
    cb.dispatch_indirect("shift", cb.slot(1, length=4), [cb.slot(0), cb.buffer(shifted := np.zeros(16, "float32"))])
    cb.end(compiled)
    for positive in (3, 0, 4):
        x = -np.ones(16, "float32")
        x[:positive] = 1
        marks, counts = np.zeros((4, 3, 2), "int32"), np.zeros(3, "int32")
        shifted[:] = 9
        cb.submit([x, counts, marks])
        assert counts.tolist() == [positive, 1, 2]
        expected = np.zeros((4, 3, 2), "int32")
        expected[:positive, :1, :2] = 1
        np.testing.assert_array_equal(marks, expected)
        np.testing.assert_array_equal(shifted, x + 1 if positive else np.full(16, 9, "float32"))


@COMPILED_AND_WALKED
def test_negative_counts_in_memory_skip(vm, compiled):
    cb = rh.vm.CommandBuffer(vm, slots=2)
    cb.begin()
    cb.dispatch_indirect("mark", cb.slot(0), [cb.slot(1)])
    cb.end(compiled)
    marks = np.zeros((4, 3, 2), "int32")
    cb.submit([np.array([-1, 1, 1], "int32"), marks])
    assert not marks.any()


@COMPILED_AND_WALKED
def test_a_predicate_chooses_between_two_variants(vm, compiled):
    cb = rh.vm.CommandBuffer(vm, slots=3, parameters=1)
    cb.begin()
    flag = cb.slot(1)
    cb.dispatch("above", 1, [cb.slot(0), flag], {"limit": cb.parameter(0)})
    cb.dispatch("shift", 1, [cb.slot(0), cb.slot(2)], when=flag)
    cb.dispatch("scale", 1, [cb.slot(0), cb.slot(2)], {"n": 16, "factor": -2.0}, unless=flag)
    cb.end(compiled)
    x, flag = np.full(16, 5, "float32"), np.zeros(1, "int32")
    for limit, expected in ((4, 6), (5, -10), (-3, 6)):
        out = np.zeros(16, "float32")
        cb.submit([x, flag, out], [limit])
        assert set(out) == {expected}


@COMPILED_AND_WALKED
@pytest.mark.parametrize(
    ("pattern", "dtype", "expected"),
    [
        (0, None, np.zeros(6, "int64")),
        (b"\x07", None, np.full(48, 7, "uint8")),
        (np.float16(1.25), None, np.full(24, 1.25, "float16")),
        (-2, "int16", np.full(24, -2, "int16")),
        (-0.0, "float32", np.full(12, -0.0, "float32")),
        (b"\x01\x02\x03\x04\x05\x06\x07\xff", None, np.full(6, np.uint64(0xFF07060504030201))),
        (2**63 - 1, "int64", np.full(6, 2**63 - 1)),
    ],
)
def test_fill(vm, compiled, pattern, dtype, expected):
    cb = rh.vm.CommandBuffer(vm, slots=1)
    cb.begin()
    cb.fill(cb.slot(0, offset=8), pattern, dtype)
    cb.end(compiled)
    memory = np.full(56 + 8, 0x55, "uint8")
    cb.submit([(memory, 0, 56)])
    assert memory[8:56].tobytes() == expected.tobytes()
    assert (memory[:8] == 0x55).all() and (memory[56:] == 0x55).all()


@COMPILED_AND_WALKED
def test_nothing_to_do(vm, compiled):
    cb = rh.vm.CommandBuffer(vm, slots=2)
    cb.begin()
    cb.end(compiled)
    assert cb.submit().done()
    cb = rh.vm.CommandBuffer(vm, slots=2)
    cb.begin()
    cb.copy(cb.slot(0), cb.slot(1))
    cb.fill(cb.slot(1), 0)
    cb.end(compiled)
    assert cb.submit([np.zeros(0), np.zeros(0)]).done()


@COMPILED_AND_WALKED
def test_a_kernel_that_fails_ends_the_submission_with_its_error(vm, compiled):
    cb = rh.vm.CommandBuffer(vm, slots=2)
    cb.begin()
    cb.fill(cb.slot(1, length=4), np.int32(1))
    cb.dispatch("refuse", 1, [cb.slot(0)])
    cb.fill(cb.slot(1, length=4), np.int32(2))
    cb.dispatch("refuse", 1, [cb.slot(0)])
    cb.end(compiled)
    done = np.zeros(1, "int32")
    for _ in range(2):
        with pytest.raises(rh.HeteroError, match=r"a command buffer failed.* -4 is negative"):
            cb.submit([np.array([-4], "int32"), done])
        assert done[0] == 1
        cb.submit([np.array([4], "int32"), done])
        assert done[0] == 2


def test_two_devices(vm):
    first, second = (rh.vm.CommandBuffer(vm, device, slots=2) for device in ("llvm:0", "llvm:1"))
    for cb in (first, second):
        cb.begin()
        cb.dispatch(vm.kernel("shift"), 1, [cb.slot(0), cb.slot(1)])
        cb.end()
    x, y, z = (tvm.runtime.empty((16,), "float32", tvm.cpu(i)) for i in (0, 0, 1))
    x.copyfrom(floats(16, 8))
    first.submit([x, y])
    second.submit([y.numpy(), z])
    np.testing.assert_array_equal(z.numpy(), x.numpy() + 1 + 1)
    np.testing.assert_array_equal(z.numpy(), vm["main"](x).numpy())
    with pytest.raises(rh.BindingError, match=r"slot 0 is on the device cpu:0, expected cpu:1 \(llvm:1\)"):
        second.bind([y, z])


def test_equal_recordings_share_code(vm):
    from relax_hetero.driver.commands.compile_commands import compile_commands

    first, second = scaling(vm), scaling(vm)
    first.end()
    before = compile_commands.cache_info()
    second.end()
    assert compile_commands.cache_info().hits == before.hits + 1
    outs = [np.zeros(16, "float32") for _ in range(2)]
    for cb, out in zip((first, second), outs, strict=True):
        cb.submit([np.ones(16, "float32"), out], [3])
    assert all((out == 3).all() for out in outs)


def test_kept_buffers_outlive_their_names(vm):
    cb = rh.vm.CommandBuffer(vm, slots=1)
    cb.begin()
    cb.copy(cb.buffer(np.arange(1000.0)), cb.slot(0))
    cb.end()
    arrays = [np.full(1000, i) for i in range(20)]
    cb.submit([out := np.zeros(1000)])
    np.testing.assert_array_equal(out, np.arange(1000.0))
    assert len(arrays) == 20


def test_the_recording_as_data(vm):
    cb = scaling(vm)
    cb.fill(cb.slot(1, offset=64, length=64), np.float64(1))
    cb.end()
    source, target = cb.spec.slots
    assert (source.nbytes, source.access, source.dtype, source.alignment) == (64, "read", "float32", 4)
    assert (target.nbytes, target.access, target.dtype, target.alignment) == (128, "write", "float32", 8)
    assert (cb.spec.parameters, cb.spec.kernels, cb.spec.runs) == (("parameter_0",), ("scale",), "host function")


RUNTIME_ONLY = """
import sys
import numpy as np
import relax_hetero as rh
vm = rh.vm.VirtualMachine(rh.load(sys.argv[1]))
cb = rh.vm.CommandBuffer(vm, slots=3, parameters=2)
cb.begin()
cb.dispatch("scale", 1, [cb.slot(0), cb.slot(1)], {"n": cb.parameter(0), "factor": cb.parameter(1)})
cb.dispatch("count_positive", 1, [cb.slot(1), cb.slot(2)])
cb.dispatch_indirect("shift", cb.slot(2, length=4), [cb.slot(0), cb.slot(1)])
cb.end()
assert cb.spec.runs == "walked commands"
x, y, counts = np.ones(16, "float32"), np.zeros(16, "float32"), np.zeros(3, "int32")
cb.submit([x, y, counts], [5, -2.5])
assert (y == [-2.5] * 5 + [0] * 11).all(), y
cb.submit([x, y, counts], [5, 2.5])
assert (y == 2).all(), y
assert "tvm.relax" not in sys.modules
assert not any("libtvm_compiler" in line for line in open("/proc/self/maps"))
"""


def test_with_tvms_runtime_only(vm, tmp_path):
    vm.executable.export_library(tmp_path / "kernels.so")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TVM_USE_RUNTIME_LIB": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUNTIME_ONLY, tmp_path / "kernels.so"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
