"""Command buffers omit TVM's checks of their arguments where the arguments' types are guaranteed."""

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.driver.link.address_table import by_address
from relax_hetero.driver.link.llvm_kernels import TRUSTED

W = np.eye(4, dtype="float32")[::-1].copy()


@I.ir_module
class Plain:
    I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "num-cores": 1})]})

    @R.function
    def main(
        x: R.Tensor(("n", 4), "float32", "llvm"), more: R.Tuple(R.Tensor((4,), "float32", "llvm"), R.Shape(["m"]))
    ):
        y = R.matmul(R.add(x, more[0]), R.const(W))
        z = R.matmul(y, R.const(W))
        return z


@I.ir_module
class Stranger:
    I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "num-cores": 1})]})

    @R.function
    def main(x: R.Tensor((2, 4), "float32", "llvm")):
        y = R.call_pure_packed("test.trusted_arguments.stranger", x, ty_args=(R.Tensor((2, 4), "float32", "llvm"),))
        z = R.matmul(R.matmul(y, R.const(W)), R.const(W))
        return z


@I.ir_module
class Anything:
    I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "num-cores": 1})]})

    @R.function
    def main(x: R.Tensor(("n", 4), "float32", "llvm"), more: R.Tuple(R.Any, R.Shape(["m"]))):
        z = R.matmul(R.matmul(x, R.const(W)), R.const(W))
        return z


def is_trusted(mod):
    """Flags of a compiled module's command buffers: True for one without checks."""
    lowered, _ = by_address(rh.get_pipeline()(mod))
    flags = [TRUSTED in func.attrs for gv, func in lowered.functions.items() if "main_commands" in gv.name_hint]
    assert flags
    return flags


def test_checks_go_where_the_machine_has_checked():
    assert is_trusted(Plain) == [True]
    machine = rh.vm.VirtualMachine(rh.compile(Plain))
    x = np.random.default_rng(0).standard_normal((3, 4)).astype("float32")
    ones = np.ones(4, "float32")
    np.testing.assert_allclose(machine["main"](x, (ones, [2])).numpy(), x + 1, rtol=1e-6)
    with pytest.raises(rh.BindingError, match="dimension 1 is 5, expected 4"):
        machine["main"](np.ones((3, 5), "float32"), (ones, [2]))


def test_checks_stay_where_a_parameter_may_be_anything():
    assert is_trusted(Anything) == [False]


def test_checks_stay_where_unknown_functions_return_tensors():
    assert is_trusted(Stranger) == [False]
    returned = [np.ones((2, 4), "float32")]

    def stranger(_):
        return tvm.runtime.tensor(returned[0])

    tvm.register_global_func("test.trusted_arguments.stranger", stranger, override=True)
    machine = rh.vm.VirtualMachine(rh.compile(Stranger))
    x = np.zeros((2, 4), "float32")
    np.testing.assert_array_equal(machine["main"](x).numpy(), returned[0])
    for wrong in (np.ones((2, 3), "float32"), np.ones((2, 4), "int32"), np.ones(8, "float32")):
        returned[0] = wrong
        with pytest.raises(rh.HeteroError):
            machine["main"](x)
    returned[0] = np.ones((2, 4), "float32")
    machine["main"](x)
