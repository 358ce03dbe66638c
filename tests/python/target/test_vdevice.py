"""Look-up, identity, default and host of vdevices, and the reading of device lists."""

from __future__ import annotations

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm.target import Target

import relax_hetero as rh
from relax_hetero.errors import VDeviceError
from relax_hetero.target import vdevice as vd

SM90 = {"kind": "cuda", "arch": "sm_90"}
SM80 = {"kind": "cuda", "arch": "sm_80"}


@pytest.fixture
def rfc_list() -> list[tvm.relax.VDevice]:
    """The list of the RFC, in today's spelling of targets."""
    return [rh.VDevice("llvm"), rh.VDevice(SM90), rh.VDevice(SM80), rh.VDevice("metal", 0, "global")]


def same(a: tvm.relax.VDevice, b: tvm.relax.VDevice) -> bool:
    return vd.same_object(a, b)


class TestLookupByName:
    @pytest.mark.parametrize(
        ("name", "position"),
        [
            ("llvm", 0),
            ("llvm:0", 0),
            ("cuda", 1),
            ("cuda:0", 1),
            ("cuda:1", 2),
            ("metal", 3),
            ("vdevice", 0),
            ("vdevice:0", 0),
            ("vdevice:1", 1),
            ("vdevice:3", 3),
            ("cuda:1:global", 2),
        ],
    )
    def test_finds(self, rfc_list, name, position):
        assert same(vd.lookup(name, rfc_list), rfc_list[position])

    @pytest.mark.parametrize("name", ["opencl", "cuda:2", "vdevice:4", "llvm:1", "metal:7"])
    def test_nothing_matches(self, rfc_list, name):
        with pytest.raises(VDeviceError) as error:
            vd.lookup(name, rfc_list)
        assert repr(name) in str(error.value)
        assert "llvm:0, cuda:0, cuda:1, metal:0" in str(error.value)

    @pytest.mark.parametrize(
        "name",
        ["", " ", "cuda:", ":1", "cuda:-1", "cuda:x", "cuda:1.0", "cuda: 1", " cuda", "cuda ", "cuda:1:", "cuda:01"]
        + ["cuda -arch=sm_90", "cuda,llvm", "cuda:1:global:2", "cuda\n", "cuda:１", "vdevice:", "vdevice:-1"],
    )
    def test_malformed(self, rfc_list, name):
        with pytest.raises(VDeviceError, match="is not a vdevice name") as error:
            vd.lookup(name, rfc_list)
        assert repr(name) in str(error.value)
        assert "llvm:0, cuda:0, cuda:1, metal:0" in str(error.value)

    def test_wrong_scope_of_the_printed_form(self, rfc_list):
        with pytest.raises(VDeviceError, match="has memory_scope 'global'"):
            vd.lookup("cuda:0:shared", rfc_list)

    @pytest.mark.parametrize("name", ["cpu", "gpu"])
    def test_suggests_the_kind_that_was_meant(self, rfc_list, name):
        with pytest.raises(VDeviceError, match=f"did you mean '{'llvm:0' if name == 'cpu' else 'cuda:0'}'"):
            vd.lookup(name, rfc_list)

    @pytest.mark.parametrize("spec", ["llvm", "vdevice:0", "nonsense!", tvm.cpu(0)])
    def test_no_vdevices(self, spec):
        with pytest.raises(VDeviceError, match="declares no vdevices"):
            vd.lookup(spec, [])

    @pytest.mark.parametrize("spec", [None, 0, 1.5, ["cuda"], b"cuda", Target("llvm")])
    def test_wrong_type(self, rfc_list, spec):
        with pytest.raises(VDeviceError, match="string, a tvm device or a VDevice"):
            vd.lookup(spec, rfc_list)

    @given(st.text(max_size=12))
    def test_any_text_is_found_or_refused(self, text):
        vdevices = [rh.VDevice("llvm"), rh.VDevice(SM90)]
        try:
            match = vd.lookup(text, vdevices)
        except VDeviceError as error:
            assert "available: llvm:0, cuda:0" in str(error)
        else:
            assert any(same(match, entry) for entry in vdevices)

    @given(st.lists(st.sampled_from(["llvm", "c", "cuda", "metal"]), min_size=1, max_size=6))
    def test_names_lead_back(self, kinds):
        vdevices = [rh.VDevice(SM90 if kind == "cuda" else kind, index) for index, kind in enumerate(kinds)]
        for index, entry in enumerate(vdevices):
            assert same(vd.lookup(vd.device_name(entry, vdevices), vdevices), entry)
            assert same(vd.lookup(f"vdevice:{index}", vdevices), entry)
            assert vd.vdevice_index(entry, vdevices) == index
        for kind in set(kinds):
            assert same(vd.lookup(kind, vdevices), vdevices[kinds.index(kind)])
            with pytest.raises(VDeviceError):
                vd.lookup(f"{kind}:{kinds.count(kind)}", vdevices)


class TestLookupByDevice:
    def test_device_type_and_id_first_wins(self):
        vdevices = [rh.VDevice("llvm", 1), rh.VDevice(SM90, 1), rh.VDevice("c", 1), rh.VDevice(SM80, 1)]
        assert same(vd.lookup(tvm.cpu(1), vdevices), vdevices[0])
        assert same(vd.lookup(tvm.cuda(1), vdevices), vdevices[1])

    @pytest.mark.parametrize("device", [tvm.cpu(1), tvm.cuda(0), tvm.metal(0)])
    def test_absent(self, device):
        with pytest.raises(VDeviceError, match="available: llvm:0, cuda:0"):
            vd.lookup(device, [rh.VDevice("llvm", 0), rh.VDevice(SM90, 1)])


class TestLookupByVDevice:
    def test_equal_one_gives_the_own_object(self, rfc_list):
        assert same(vd.lookup(rh.VDevice(SM80), rfc_list), rfc_list[2])

    def test_own_object_wins_over_an_equal_one(self):
        twice = [rh.VDevice("llvm"), rh.VDevice("llvm")]
        assert same(vd.lookup(twice[1], twice), twice[1])
        assert same(vd.lookup(rh.VDevice("llvm"), twice), twice[0])
        assert vd.device_name(twice[1], twice) == "llvm:1"

    @pytest.mark.parametrize(
        "other", [rh.VDevice(SM80, 1), rh.VDevice(SM80, 0, "shared"), rh.VDevice({"kind": "cuda", "arch": "sm_75"})]
    )
    def test_any_difference_makes_another(self, rfc_list, other):
        with pytest.raises(VDeviceError, match="not among the vdevices"):
            vd.lookup(other, rfc_list)
        with pytest.raises(VDeviceError, match="not among the vdevices"):
            vd.device_name(other, rfc_list)


class TestIdentity:
    def test_same_vdevice(self):
        assert vd.same_vdevice(rh.VDevice("llvm"), rh.VDevice("llvm"))
        assert vd.same_vdevice(None, None)
        assert not vd.same_vdevice(rh.VDevice("llvm"), None)
        assert not vd.same_vdevice(None, rh.VDevice("llvm"))
        assert not vd.same_vdevice(rh.VDevice("llvm"), rh.VDevice("llvm", 1))
        assert not vd.same_vdevice(rh.VDevice("llvm"), rh.VDevice("llvm", 0, "shared"))
        assert not vd.same_vdevice(rh.VDevice("llvm"), rh.VDevice("c"))

    def test_physical_device_may_be_shared(self):
        assert vd.physical(rh.VDevice("llvm", 3)) == vd.physical(rh.VDevice("c", 3)) == (1, 3)
        assert vd.physical(rh.VDevice(SM90, 1)) == (2, 1)

    def test_default_and_host(self):
        cuda, llvm, c = rh.VDevice(SM90), rh.VDevice("llvm"), rh.VDevice("c", 1)
        assert same(vd.default_vdevice([cuda, llvm]), cuda)
        assert same(vd.host_vdevice([llvm, c, cuda]), c)
        assert vd.host_vdevice([cuda]) is None
        assert vd.host_vdevice([]) is None
        with pytest.raises(VDeviceError, match="no vdevices are declared"):
            vd.default_vdevice([])


class TestModules:
    def test_list_is_replaced_in_a_copy(self):
        before = tvm.IRModule(
            {}, global_infos={"vdevice": [rh.VDevice("llvm")], "other": [tvm.relax.DummyGlobalInfo()]}
        )
        new = [rh.VDevice(SM90), rh.VDevice("llvm")]
        after = vd.with_vdevices(before, new)
        assert [entry.target.kind.name for entry in vd.vdevices_of(before)] == ["llvm"]
        assert all(same(a, b) for a, b in zip(vd.vdevices_of(after), new, strict=True))
        assert "other" in after.global_infos

    def test_no_list(self):
        assert vd.vdevices_of(tvm.IRModule({})) == []

    @pytest.mark.parametrize(
        "entry", [tvm.relax.DummyGlobalInfo(), tvm.relax.VDevice(None), tvm.relax.VDevice("llvm", -1)]
    )
    def test_malformed_list(self, entry):
        mod = tvm.IRModule({}, global_infos={"vdevice": [rh.VDevice("llvm"), entry]})
        with pytest.raises(VDeviceError, match="entry 1 of the module's vdevice list"):
            vd.vdevices_of(mod)
