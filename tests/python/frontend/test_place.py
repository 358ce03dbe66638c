"""`rh.place` on modules that no importer of this library made."""

import numpy as np
import pytest
import tvm
from tvm.relax.frontend import nn
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module

DEVICES = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v2"}]


class Net(nn.Module):
    def __init__(self):
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(nn.op.relu(self.first(x)))


@ir_module({"kind": "llvm"}, ({"kind": "llvm", "mcpu": "x86-64-v2"}, 1))
def Hinted(x: R.Tensor((3,), "float32"), c: R.Tensor((), "bool")):
    a = R.exp(x)
    b = R.hint_on_device(R.tanh(a), tvm.cpu(1))
    if c:
        d = R.add(b, b)
    else:
        d = R.subtract(b, b)
    return d


def exported():
    return Net().export_tvm({"forward": {"x": nn.spec.Tensor((2, 4), "float32")}})[0]


def positions(mod, name):
    bindings = [binding for block in mod[name].body.blocks for binding in block.bindings]
    return {str(b.var.name): int(b.var.ty.vdevice.vdevice_id) for b in bindings}


def test_rules_match_modules_by_their_parameters():
    mod = exported()
    placed = rh.place(mod, {"second": "llvm:1"}, DEVICES)
    rh.transform.verify_placement(placed)
    actual = positions(placed, "forward")
    assert [name for name, position in actual.items() if position == 0] == ["permute_dims", "matmul", "add", "relu"]
    values = [
        np.random.default_rng(0).standard_normal([int(dim) for dim in param.ty.shape.values]).astype("float32")
        for param in mod["forward"].params
    ]
    results = [rh.vm.VirtualMachine(rh.compile(m))["forward"](*values).numpy() for m in (mod, placed)]
    np.testing.assert_allclose(*results, atol=1e-5)


def test_the_first_rule_decides_and_ops_match_with_and_without_their_namespace():
    placed = rh.place(exported(), [("relax.add", "llvm:1"), ("second.bias", "llvm:0"), ("matmul*", "llvm:1")], DEVICES)
    actual = positions(placed, "forward")
    assert (actual["matmul"], actual["add"], actual["add1"], actual["relu"]) == (1, 1, 1, 0)


def test_hints_stay_where_no_rule_matches():
    placed = rh.place(Hinted, {"a": "llvm:1"})
    rh.transform.verify_placement(placed)
    actual = positions(placed, "main")
    assert (actual["a"], actual["b"], actual["d"]) == (1, 1, 1)
    assert positions(rh.place(Hinted, {"relax.exp": "llvm:0"}), "main")["b"] == 1


def test_a_pattern_without_a_match_is_an_error():
    with pytest.raises(rh.FrontendError, match="'secnd' matches no"):
        rh.place(exported(), {"secnd": "llvm:1"}, DEVICES)
    with pytest.raises(rh.FrontendError, match="vdevices"):
        rh.place(exported(), {"second": "llvm:1"})
    with pytest.raises(rh.PlacementError, match="main"):
        rh.place(exported(), "auto", DEVICES)


def test_without_torch_the_import_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(rh.FrontendError, match="needs PyTorch"):
        rh.from_torch(object(), ())
