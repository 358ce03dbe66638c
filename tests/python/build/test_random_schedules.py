"""Random small graphs over one to three devices: calls in flight give the bits of plain calls."""

from unittest import mock

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from build.random_graphs import modules
from relax_hetero.transform import work_parts

DEVICES = [rh.VDevice({"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}, index) for index in range(3)]
GRAPHS = st.integers(1, 3).flatmap(lambda count: modules(DEVICES[:count]))


@given(GRAPHS, st.integers(0, 1 << 30), st.booleans(), st.booleans())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_same_bits(graph, seed, buffers, join_small):
    mod, shapes = graph
    with mock.patch.object(work_parts, "SMALL", work_parts.SMALL if join_small else -1):
        vm = rh.vm.VirtualMachine(rh.compile(mod, command_buffers=buffers))
    rng = np.random.default_rng(seed)
    calls = [[rng.standard_normal(shape).astype("float32") for shape in shapes] for _ in range(6)]
    wanted = [vm["main"](*args) for args in calls]
    for fence, want in zip([vm.submit("main", *args) for args in calls], wanted, strict=True):
        for got, expected in zip(fence.result(60), want, strict=True):
            np.testing.assert_array_equal(got.numpy(), expected.numpy())
