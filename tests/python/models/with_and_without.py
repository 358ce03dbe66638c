"""Modules compiled with command buffers and without them, and run side by side."""

import numpy as np
from tvm import relax

import relax_hetero as rh

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}


def flat(out):
    """The arrays of nested tuples of tensors."""
    return [array for field in out for array in flat(field)] if isinstance(out, tuple) else [out.numpy()]


def regions(exe):
    """How many command buffers an executable has."""
    return len(exe.metadata.regions)


def machines(mod, buffers=1):
    """A machine with command buffers, and one without."""
    exe = rh.compile(mod)
    assert regions(exe) == buffers
    return rh.vm.VirtualMachine(exe), rh.vm.VirtualMachine(rh.compile(mod, command_buffers=False))


def same(mod, *calls, buffers=1):
    """The results of `main` for each of several argument lists, which both machines agree on; other calls between."""
    on, off = machines(mod, buffers)
    results = []
    for args in calls:
        got, want = flat(on["main"](*args)), flat(off["main"](*args))
        assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in want]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
        results.append(got)
    for args, want in zip(calls, results, strict=True):  # again: nothing is left over from the calls between
        for a, b in zip(flat(on["main"](*args)), want, strict=True):
            np.testing.assert_array_equal(a, b)
    return results


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def chain(kernel, count=3, target=V4, shape=(4,)):
    """A module whose `main` runs a kernel of one float tensor again and again."""
    device = rh.VDevice(target)
    ty = relax.TensorType(shape, "float32", device)
    builder = relax.BlockBuilder()
    x = relax.Var("x", ty)
    with builder.function("main", [x]):
        value = x
        with builder.dataflow():
            for _ in range(count):
                value = builder.emit(relax.call_tir(builder.add_func(kernel, "kernel"), (value,), ty))
            out = builder.emit_output(value)
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", [device])
    return mod
