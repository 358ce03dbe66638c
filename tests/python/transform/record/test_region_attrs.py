"""Attributes of command buffers: references, requirements, kernels, and where runs ended."""

import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact.commands import Dispatch, Reference, ScalarParam, SlotSpec, TensorParam
from relax_hetero.tir.core.raw_kernel import raw_signature
from relax_hetero.transform.ir.remarks import remarks_of
from relax_hetero.transform.record.form_command_buffers import form_command_buffers
from relax_hetero.transform.record.region_attrs import (
    kernel_spec,
    kernels_of,
    region_spec,
    regions_of,
)
from relax_hetero.transform.record.region_ir import OutlinedRegion, RegionStep, RegionValue


def formed(mod):
    return form_command_buffers(rh.transform.FormDispatches()(rh.transform.RealizeVDevice()(mod)))


@ir_module("llvm", "llvm:1")
class TwoDevices:
    """Runs on both devices, ended by a transfer and by control flow; one kernel by itself."""

    @T.prim_func(private=True)
    def scale(A: T.Buffer((16,), "float16"), W: T.Buffer((16,), "float16"), B: T.Buffer((16,), "float16")):
        T.func_attr({"op_pattern": 8})
        for i in range(16):
            B[i] = A[i] * W[i]

    @T.prim_func(private=True)
    def both(A: T.Buffer((16,), "float16"), B: T.Buffer((16,), "float16"), C: T.Buffer((16,), "bool")):
        T.func_attr({"op_pattern": 8})
        for i in range(16):
            B[i] = A[i] + A[i]
            C[i] = A[i] > A[0]

    @R.function
    def main(x: R.Tensor((16,), "float16", "llvm:0"), condition: R.Tensor((), "bool", "llvm:1")):
        cls = TwoDevices
        a = R.call_tir(cls.scale, (x, R.const([2] * 16, "float16")), out_ty=R.Tensor((16,), "float16", "llvm:0"))
        b = R.call_tir(cls.both, (a,), out_ty=[R.Tensor((16,), "float16", "llvm:0"), R.Tensor((16,), "bool", "llvm:0")])
        c = b[0]
        moved = R.to_vdevice(c, "llvm:1")
        d = R.call_tir(cls.scale, (moved, moved), out_ty=R.Tensor((16,), "float16", "llvm:1"))
        e = R.call_tir(cls.scale, (d, moved), out_ty=R.Tensor((16,), "float16", "llvm:1"))
        if condition:
            f = R.call_tir(cls.scale, (e, e), out_ty=R.Tensor((16,), "float16", "llvm:1"))
            g = f
        else:
            g = e
        return g


def test_regions_say_what_their_commands_touch():
    mod = formed(TwoDevices)
    first, second = regions_of(mod)
    assert (first.name, first.function, first.device, first.runs) == ("main_commands", "main", 0, "host function")
    assert first.slots == (
        SlotSpec("x", 0, 32, 64, "read", "float16", (16,)),
        SlotSpec("b_0", 0, 32, 64, "write", "float16", (16,)),
    )
    x, a, flags = Reference("slot", 0, 0, 32), Reference("arena", 0, 0, 32), Reference("arena", 0, 64, 16)
    assert first.commands == (
        Dispatch("scale", (x, Reference("direct", 0, 0, 32), a), variable="a"),
        Dispatch("both", (a, Reference("slot", 1, 0, 32), flags), variable="b"),
    )
    assert (first.directs, first.parameters, first.arena) == ((0,), (), 128)
    assert second.device == 1 and [slot.access for slot in second.slots] == ["read", "write"]
    assert first.ended_by == "transfer (moved)" and second.ended_by == "control flow (g)"
    kernels = kernels_of(mod)
    assert [tensor.access for tensor in kernels["both"].tensors] == ["read", "write", "write"]
    assert [tensor.alignment for tensor in kernels["both"].tensors] == [2, 2, 1]
    (single,) = remarks_of(mod).single_calls
    assert (single.function, single.variable, single.why) == ("main", "f", "no other kernel to run with")


def test_symbols_of_one_name_are_distinguished():
    n, other, keyword = (tirx.Var(name, "int64") for name in ("n", "n", "min"))
    device = rh.VDevice("llvm")

    def value(name, extent, **fields):
        return RegionValue(relax.TensorType([extent], "float32", device), name, **fields)

    x, y, z = value("x", n), value("y", other), value("z", keyword, begin=1, end=1, is_result=True)
    inside = value("t", n + other, offset=other * 64)
    kernel = tvm.ir.GlobalVar("k")
    steps = [
        RegionStep(kernel, (x, y, inside), ("read", "read", "write"), (n, tirx.FloatImm("float32", 0.5)), "t"),
        RegionStep(kernel, (x, inside, z), ("read", "read", "write"), (keyword - 1, tirx.IntImm("int64", 3)), "z"),
    ]
    outlined = OutlinedRegion(tvm.ir.GlobalVar("c"), "main", device, [x, y], [], [z], [], other * 128, steps)
    region = region_spec(outlined, [device])
    assert region.parameters == ("n", "n_1", "min_1")
    assert [slot.shape for slot in region.slots] == [("n",), ("n_1",), ("min_1",)]
    assert region.arena == "(n_1 * 128)"
    assert region.commands[0].operands[2].offset == "(n_1 * 64)" and region.commands[0].scalars == ("n", 0.5)
    assert region.commands[1].scalars == ("(min_1 - 1)", 3)


@I.ir_module
class Grids:
    @T.prim_func
    def tiles(a: T.handle, b: T.handle, scale: T.float32, x: T.int32, y: T.int32):
        T.func_attr({"target": T.target({"kind": "llvm"}), "relax_hetero.workgroups": 2})
        n = T.int64()
        A = T.match_buffer(a, (n, 4), "float64")
        B = T.match_buffer(b, (n, 4), "float64")
        B[x, y] = A[x, y] * T.cast(scale, "float64")

    @T.prim_func
    def too_many(A: T.Buffer((4,), "float32"), x: T.int32):
        T.func_attr({"target": T.target({"kind": "llvm"}), "relax_hetero.workgroups": 2})
        A[x] = T.float32(1)


def spec_of(name, device):
    return kernel_spec(name, Grids[name], raw_signature(Grids[name]), device)


def test_kernels_for_command_buffers_by_hand():
    kernel = spec_of("tiles", 3)
    assert kernel.tensors == (
        TensorParam("A", "float64", ("n", 4), 8, "read"),
        TensorParam("B", "float64", ("n", 4), 8, "write"),
    )
    names = ("n", "int64"), ("scale", "float32"), ("x", "int32"), ("y", "int32")
    assert kernel.scalars == tuple(ScalarParam(*each) for each in names)
    assert (kernel.device, kernel.workgroups) == (3, 2)


def test_workgroup_numbers_are_the_last_parameters():
    expected = r"kernel 'too_many' has 'relax_hetero.workgroups' = 2, but takes \(A, x\); expected 0 to 3"
    with pytest.raises(rh.BuildError, match=expected):
        spec_of("too_many", 0)
