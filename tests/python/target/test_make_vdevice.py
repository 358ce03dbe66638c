"""Making vdevices, and reading `vdevices=` lists."""

from __future__ import annotations

import json

import pytest
import tvm
from tvm.target import Target

import relax_hetero as rh
from relax_hetero.errors import VDeviceError
from relax_hetero.target import vdevice as vd

SM90 = {"kind": "cuda", "arch": "sm_90"}


class TestMake:
    def test_is_the_stock_vdevice(self):
        vdevice = rh.VDevice("llvm", 1, "global")
        assert isinstance(vdevice, tvm.relax.VDevice)
        tvm.ir.assert_structural_equal(vdevice, tvm.relax.VDevice("llvm", 1, "global"))

    @pytest.mark.parametrize("target", ["opengl", "", "llvm -mcpu=skylake", {}, {"kind": "llvm", "bogus": 1}, None, 3])
    def test_wrong_target(self, target):
        with pytest.raises(VDeviceError, match="target"):
            rh.VDevice(target)

    @pytest.mark.parametrize("kind", ["composite", "cuda_host", "test"])
    def test_target_without_device(self, kind):
        with pytest.raises(VDeviceError, match="target kind of a device"):
            rh.VDevice(kind)

    @pytest.mark.parametrize("vdevice_id", [-1, 1.0, "0", None, True, 2**31])
    def test_wrong_id(self, vdevice_id):
        with pytest.raises(VDeviceError, match="'llvm' must be an int >= 0"):
            rh.VDevice("llvm", vdevice_id)

    @pytest.mark.parametrize("scope", ["", " global", "global scope", "global:1", None, 3])
    def test_wrong_scope(self, scope):
        with pytest.raises(VDeviceError, match="storage scope"):
            rh.VDevice("llvm", 0, scope)

    @pytest.mark.parametrize("scope", ["global", "global.texture-weight", "shared.dyn"])
    def test_tvm_scopes(self, scope):
        assert rh.VDevice("llvm", 0, scope).memory_scope == scope


class TestParse:
    def ids(self, specs) -> list[tuple[str, int]]:
        return [(entry.target.kind.name, entry.vdevice_id) for entry in vd.parse_vdevices(specs)]

    @pytest.mark.parametrize(
        ("specs", "expected"),
        [
            (["llvm"], [("llvm", 0)]),
            ("llvm", [("llvm", 0)]),
            (("llvm", "llvm"), [("llvm", 0), ("llvm", 1)]),
            (["llvm", "c", "cuda", "llvm"], [("llvm", 0), ("c", 1), ("cuda", 0), ("llvm", 2)]),
            (["cuda:1"], [("cuda", 1)]),
            (["cuda:1", "cuda"], [("cuda", 1), ("cuda", 0)]),
            (["cuda:0", "cuda"], [("cuda", 0), ("cuda", 1)]),
            (["llvm:0", "llvm:0"], [("llvm", 0), ("llvm", 0)]),
            (["llvm:1", SM90, {"kind": "llvm"}, Target("c")], [("llvm", 1), ("cuda", 0), ("llvm", 0), ("c", 2)]),
            ([tvm.relax.VDevice("llvm", 0), "llvm"], [("llvm", 0), ("llvm", 1)]),
            (['{"kind": "llvm", "mcpu": "skylake"}'], [("llvm", 0)]),
            (["nvidia/nvidia-h100:2"], [("cuda", 2)]),
        ],
    )
    def test_numbers(self, specs, expected):
        assert self.ids(specs) == expected

    def test_targets(self):
        native, generic, json_target, gpu = vd.parse_vdevices(
            ["llvm", {"kind": "llvm"}, json.dumps({"kind": "llvm", "mcpu": "skylake"}), "cuda"]
        )
        tvm.ir.assert_structural_equal(native.target, rh.native("llvm"))
        assert "mcpu" not in generic.target.attrs
        assert json_target.target.attrs["mcpu"] == "skylake"
        assert gpu.target.arch != "sm_50"

    def test_vdevice_is_kept(self):
        own = rh.VDevice("llvm", 5, "shared")
        assert vd.same_object(vd.parse_vdevices([own])[0], own)

    def test_cuda_without_arch_is_not_sm_50(self):
        (entry,) = vd.parse_vdevices([{"kind": "cuda", "max_num_threads": 256}])
        assert entry.target.arch == rh.native("cuda").arch
        assert entry.target.attrs["max_num_threads"] == 256

    @pytest.mark.parametrize(
        "spec",
        ["foo", "", "cuda:", "cuda:x", "cuda:-1", "cuda: 1", " llvm", "llvm -mcpu=x", "{", "[1]", '{"kind": "foo"}']
        + [3, None, ["llvm"], {"kind": "llvm", "bogus": 1}, Target("composite")]
        + [tvm.relax.VDevice(None), tvm.relax.VDevice("llvm", -1)],
    )
    def test_wrong_entry_is_named(self, spec):
        with pytest.raises(VDeviceError, match=r"^vdevices\[1\]: "):
            vd.parse_vdevices(["llvm", spec])

    @pytest.mark.parametrize("specs", [[], (), 3, None])
    def test_wrong_list(self, specs):
        with pytest.raises(VDeviceError, match="vdevices"):
            vd.parse_vdevices(specs)
