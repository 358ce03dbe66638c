"""Random small graphs over two devices: command buffers give the same bits, whatever the arena held before."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from driver.random_graphs import modules

DEVICES = [rh.VDevice({"kind": "llvm", "mcpu": "x86-64-v4"}, 0), rh.VDevice({"kind": "llvm", "mcpu": "x86-64-v2"}, 1)]


@given(modules(DEVICES), st.integers(0, 1 << 30))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_same_bits(graph, seed):
    mod, shapes = graph
    on, off = (rh.vm.VirtualMachine(rh.compile(mod, command_buffers=buffers)) for buffers in (True, False))
    rng = np.random.default_rng(seed)
    for _ in range(3):
        args = [rng.standard_normal(shape).astype("float32") for shape in shapes]
        for got, want in zip(on["main"](*args), off["main"](*args), strict=True):
            np.testing.assert_array_equal(got.numpy(), want.numpy())
