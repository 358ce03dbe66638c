"""Behaviours of TVM 0.27 that this machine replaces: theirs, where it is cheap to show, and ours."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tvm
from tvm.runtime.vm import VirtualMachine as StockMachine

import relax_hetero as rh
from relax_hetero.artifact.metadata import body_symbol

X, W = np.zeros((2, 4), "float32"), np.ones(4, "float32")


def test_row_12_stock_inputs_all_go_to_the_first_device(chain):
    stock = StockMachine(chain.module, [tvm.cpu(0), tvm.cpu(1)])
    tensors = tvm.runtime.tensor(X, tvm.cpu(0)), tvm.runtime.tensor(W, tvm.cpu(1))
    stock.set_input("main", *tensors)
    with pytest.raises(Exception):  # noqa: B017 (whatever TVM raises)
        stock.invoke_stateful("main")

    vm = rh.vm.VirtualMachine(chain)
    vm.set_input("main", *tensors)
    vm.invoke_stateful("main")
    np.testing.assert_array_equal(vm.get_output("main", 0).numpy(), np.full((2, 4), 2))


def test_row_13_a_wrong_device_list_is_refused_when_the_machine_is_made(chain):
    devices = [tvm.device("cuda", 0)]
    stock = StockMachine.__new__(StockMachine)
    stock.module = chain.module["vm_load_executable"]()
    with pytest.raises(Exception):  # noqa: B017 (no GPU, or a failing kernel later)
        stock._setup_device(devices, None)
        stock["main"](tvm.runtime.tensor(X), tvm.runtime.tensor(W))
    assert len(devices) == 2  # stock appends the host to the caller's list

    devices = [tvm.cpu(0)]
    with pytest.raises(rh.BindingError, match="1 devices given, expected 2: llvm:0, llvm:1"):
        rh.vm.VirtualMachine(chain, devices)
    assert len(devices) == 1


def test_row_14_kernels_check_the_device_id_and_users_never_meet_that_check(chain):
    stock = StockMachine(chain.module, [tvm.cpu(0), tvm.cpu(1)])
    with pytest.raises(Exception, match="device_id"):
        from relax_hetero.vm.device.builtins import running_on

        with running_on([tvm.cpu(0), tvm.cpu(1)], ["global"] * 2):
            stock[body_symbol("main")](tvm.runtime.tensor(X, tvm.cpu(1)), tvm.runtime.tensor(W, tvm.cpu(1)))

    vm = rh.vm.VirtualMachine(chain)
    for devices in [(0, 0), (0, 1), (1, 0), (1, 1), (5, 6)]:
        x, w = (tvm.runtime.tensor(a, tvm.cpu(i)) for a, i in zip((X, W), devices, strict=True))
        np.testing.assert_array_equal(vm["main"](x, w)[0].numpy(), np.full((2, 4), 2))


def test_row_19_one_machine_serves_several_threads(chain):
    vm = rh.vm.VirtualMachine(chain)
    start = threading.Barrier(4)

    def call(value):
        start.wait()
        return [vm["main"](np.full((1, 4), value, "float32"), W)[0].numpy() for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        for value, results in enumerate(pool.map(call, range(4))):
            np.testing.assert_allclose(results, np.full((50, 1, 4), np.exp(value) + 1), rtol=1e-6)


def test_row_20_tensors_inside_an_allocation_work(chain):
    storage = tvm.runtime.tensor(np.zeros(64, "float32"))
    view = storage._create_view((2, 4), "float32", 64)
    stock = StockMachine(chain.module, [tvm.cpu(0), tvm.cpu(1)])
    with pytest.raises(Exception, match="byte_offset"):
        stock[body_symbol("main")](view, tvm.runtime.tensor(W, tvm.cpu(1)))

    z, _ = rh.vm.VirtualMachine(chain)["main"](view, W)
    np.testing.assert_array_equal(z.numpy(), np.full((2, 4), 2))
