"""Encoded tensors between devices: right numbers, and the encodings still there.

Each module is run on its own devices and with all of its CPUs exchanged for others; what was encoded is read from the
report of the executable, and the kernels from its dispatches.
"""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module, ops_of
from relax_hetero.op.encoded import RELAYOUT

pytestmark = pytest.mark.sampled(4)

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V3 = {"kind": "llvm", "mcpu": "x86-64-v3"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def compiled(mod, **weights):
    return rh.compile(mod, weights)


def products(exe):
    """(device, layout of each operand and of the result) of every encoded product, by device."""
    report = exe.metadata.encodings
    assert report["cancelled"] == []
    ops = sorted((op for op in report["ops"] if op["op"] == "matmul"), key=lambda op: op["device"])
    return [(op["device"], {operand["role"]: operand["layout"] for operand in op["operands"]}) for op in ops]


def kernels(exe):
    """(device index, what it computes) of every dispatch that computes on tensors."""
    return sorted((dispatch.device, *dispatch.ops) for dispatch in exe.metadata.dispatches.values() if dispatch.ops)


def check(exe, devices, args, want):
    """The numbers, three times with the same machine, on the manifest's devices and on others."""
    for binding in (None, *devices):
        vm = rh.vm.VirtualMachine(exe, binding)
        for _ in range(2):
            np.testing.assert_allclose(vm["main"](*args).numpy(), want, rtol=1e-5, atol=1e-5)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, "float32")


OTHERS = ([tvm.cpu(0), tvm.cpu(1)], [tvm.cpu(1), tvm.cpu(0)], [tvm.cpu(3), tvm.cpu(2)])


@ir_module(V4, "c:1")
def SameProduct(x: R.Tensor(("m", "k"), "float32", "llvm:0"), w: R.Tensor(("k", "n"), "float32", "llvm:0")) -> R.Tensor(
    ("m", "n"), "float32", "llvm:0"
):
    with R.dataflow():
        a = R.matmul(x, w)
        x1 = R.to_vdevice(x, "c:0")
        w1 = R.to_vdevice(w, "c:0")
        b = R.matmul(x1, w1)
        a1 = R.to_vdevice(a, "c:0")
        s = R.add(a1, b)
        y = R.to_vdevice(s, "llvm:0")
        R.output(y)
    return y


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (17, 9, 35), (64, 33, 1)])
def test_the_same_product_on_two_devices(shape):
    """Every device computes with its own layouts; the sum is one of encoded values."""
    m, k, n = shape
    exe = compiled(SameProduct)
    (first, _), (second, _) = entries = products(exe)
    assert (first, second) == ("c:0", "llvm:0")
    assert entries[0][1]["rhs"] != entries[1][1]["rhs"] and entries[0][1]["result"] != entries[1][1]["result"]
    x, w = normal(m, k), normal(k, n)
    check(exe, OTHERS, (x, w), 2 * (x @ w))


@ir_module(V4, "c:1")
def SameWeight(x: R.Tensor(("m", 5), "float32", "llvm:0"), w: R.Tensor((5, 11), "float32")):
    R.func_attr({"num_input": 1})
    with R.dataflow():
        a = R.matmul(x, w)
        x1 = R.to_vdevice(x, "c:0")
        b = R.nn.relu(R.matmul(x1, w))
        b1 = R.to_vdevice(b, "llvm:0")
        y = R.subtract(a, b1)
        R.output(y)
    return y


def test_the_same_weight_on_two_devices():
    """Packed once for each, at compile time; the source is gone."""
    w = normal(5, 11)
    exe = compiled(SameWeight, w=w)
    shapes = [(spec.shape, spec.device) for spec in exe.metadata.constants if spec.addresses is None]
    assert len(shapes) == 2 and {device for _, device in shapes} == {0, 1}
    assert shapes[0][0] != shapes[1][0] and all(shape != (5, 11) for shape, _ in shapes)
    x = normal(7, 5)
    check(exe, OTHERS, (x,), x @ w - np.maximum(x @ w, 0))


@ir_module(V4, (V2, 1), "c:2")
def ThreeSources(
    x: R.Tensor(("m", 6), "float32", "llvm:0"),
    w: R.Tensor((6, 9), "float32", "llvm:1"),
    r: R.Tensor(("m", 9), "float32", "c:0"),
):
    with R.dataflow():
        a = R.matmul(x, R.to_vdevice(w, "llvm:0"))
        a1 = R.to_vdevice(a, "llvm:1")
        x1 = R.to_vdevice(x, "llvm:1")
        b = R.matmul(x1, w)
        c = R.matmul(R.to_vdevice(x, "c:0"), R.to_vdevice(w, "c:0"))
        c1 = R.to_vdevice(c, "llvm:1")
        r1 = R.to_vdevice(r, "llvm:1")
        y = R.add(R.multiply(R.add(b, a1), c1), r1)
        R.output(y)
    return y


def test_a_dispatch_whose_operands_come_from_three_devices():
    """One kernel on llvm:1: its product, and what came from llvm:0 and c:0 in the epilogue."""
    exe = compiled(ThreeSources)
    assert [device for device, _ in products(exe)] == ["c:0", "llvm:0", "llvm:1"]
    assert (1, "matmul", "add", "multiply") in kernels(exe)
    placements = ([tvm.cpu(0), tvm.cpu(0), tvm.cpu(0)], [tvm.cpu(2), tvm.cpu(0), tvm.cpu(1)])
    for m in (1, 4, 19):
        x, w, r = normal(m, 6), normal(6, 9), normal(m, 9, seed=1)
        check(exe, placements, (x, w, r), 2 * (x @ w) * (x @ w) + r)


@ir_module(V4, V3, "c")
def OnePhysicalDevice(x: R.Tensor((12, 20), "float32", "llvm:0"), w: R.Tensor((20, 40), "float32")):
    with R.dataflow():
        a = R.matmul(x, w)
        b = R.matmul(R.to_vdevice(x, "llvm:1"), w)
        c = R.matmul(R.to_vdevice(x, "c:0"), w)
        y = R.add(R.add(a, R.to_vdevice(b, "llvm:0")), R.to_vdevice(c, "llvm:0"))
        R.output(y)
    return y


def test_different_targets_on_one_physical_device():
    """All on cpu(0): tensors are not copied between them, and never read in another's layout."""
    w = normal(20, 40)
    exe = compiled(OnePhysicalDevice, w=w)
    assert [device for device, _ in products(exe)] == ["c:0", "llvm:0", "llvm:1"]
    assert [kernel[0] for kernel in kernels(exe) if "matmul" in kernel] == [0, 1, 2]
    x = normal(12, 20)
    check(exe, ([tvm.cpu(0)] * 3, [tvm.cpu(0), tvm.cpu(1), tvm.cpu(2)]), (x,), 3 * (x @ w))


_SIZES = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=?, n=10, k=6>"
LHS, RHS, OUT = (f"matmul[{i}]{_SIZES}" for i in range(3))


@ir_module("c", (V4, 1))
def EncodedOnTheWay(x: R.Tensor(("m", 6), "float32", "c:0"), w: R.Tensor((6, 10), "float32", "c:0")):
    with R.dataflow():
        x1 = R.hetero.set_encoding(x, LHS)
        w1 = R.hetero.set_encoding(w, RHS)
        a = R.hetero.matmul(x1, w1, encoding=OUT)
        x2 = R.to_vdevice(x1, "llvm:0")
        w2 = R.to_vdevice(w1, "llvm:0")
        a2 = R.to_vdevice(a, "llvm:0")
        b = R.hetero.matmul(x2, w2, encoding=OUT)
        s = R.hetero.elementwise(b, a2, expression="add(x0, x1)", encoding=OUT)
        t = R.to_vdevice(s, "c:0")
        u = R.hetero.elementwise(t, a, expression="subtract(x0, x1)", encoding=OUT)
        y = R.hetero.unset_encoding(u, OUT)
        R.output(y)
    return y


@pytest.mark.parametrize("bound", [True, False])
def test_encoded_tensors_cross_in_both_directions(bound):
    """Operands, results and a weight cross encoded: laid out again where that is cheaper, or at compile time."""
    x, w = normal(13, 6), normal(6, 10)
    exe = compiled(EncodedOnTheWay, **({"w": w} if bound else {}))
    transfers = exe.metadata.encodings["transfers"]
    assert {transfer["relayout"].split(":")[0] for transfer in transfers if transfer["relayout"]} == {"on llvm"}
    assert len(products(exe)) == 2
    check(exe, OTHERS, (x,) if bound else (x, w), x @ w)


def test_a_weight_that_is_transferred_is_packed_where_it_goes():
    exe = compiled(EncodedOnTheWay, w=normal(6, 10))
    assert sorted(spec.device for spec in exe.metadata.constants if spec.addresses is None) == [0, 1]
    packed_by = {kernel for kernel in kernels(exe) if kernel[1] in ("pack", "relayout")}
    assert all(device != 0 or op == "pack" for device, op in packed_by)  # only activations are laid out at run time


def test_integers_between_devices():
    """Exact, with the layout that carries column sums on one side and the plain one on the other."""

    @ir_module(V4, "c:1")
    def Mod(x: R.Tensor(("m", 9), "int8", "llvm:0"), w: R.Tensor((9, 21), "int8")):
        with R.dataflow():
            a = R.matmul(R.astype(x, "int32"), R.astype(w, "int32"))
            x1 = R.to_vdevice(x, "c:0")
            b = R.matmul(R.astype(x1, "int32"), R.astype(w, "int32"))
            y = R.add(a, R.to_vdevice(b, "llvm:0"))
            R.output(y)
        return y

    rng = np.random.default_rng(4)
    w = rng.integers(-128, 128, (9, 21)).astype("int8")
    exe = compiled(Mod, w=w)
    assert [device for device, _ in products(exe)] == ["c:0", "llvm:0"]
    for m in (1, 8, 15):
        x = rng.integers(-128, 128, (m, 9)).astype("int8")
        got = rh.vm.VirtualMachine(exe)["main"](x).numpy()
        np.testing.assert_array_equal(got, 2 * (x.astype("int32") @ w.astype("int32")))


_TYPED = """
@I.ir_module
class Mod:
    I.module_global_infos({{"vdevice": [I.vdevice(NATIVE, 0), I.vdevice("c", 1), I.vdevice(V3, 2)]}})

    @R.function
    def main(x: R.Tensor(("m", 11), "{lhs}", "llvm:0"), w: R.Tensor((11, 37), "{rhs}", "llvm:0")):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, "matmul[0]{sizes}")
            w1 = R.hetero.set_encoding(w, "matmul[1]{sizes}")
            p = R.hetero.matmul(x1, w1, encoding="matmul[2]{sizes}")
            x2 = R.to_vdevice(x1, "c:0")
            w2 = R.to_vdevice(w1, "c:0")
            q = R.hetero.matmul(x2, w2, encoding="matmul[2]{sizes}")
            x3 = R.to_vdevice(x2, "llvm:1")
            w3 = R.to_vdevice(w2, "llvm:1")
            r = R.hetero.matmul(x3, w3, encoding="matmul[2]{sizes}")
            w4 = R.to_vdevice(w3, "llvm:0")
            s = R.hetero.matmul(x1, w4, p, encoding="matmul[2]{sizes}")
            q1 = R.to_vdevice(q, "llvm:0")
            r1 = R.to_vdevice(r, "llvm:0")
            t = R.hetero.elementwise(s, q1, r1, expression="add(add(x0, x1), x2)", encoding="matmul[2]{sizes}")
            y = R.hetero.unset_encoding(t, "matmul[2]{sizes}")
            R.output(y)
        return y
"""


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize(
    ("lhs", "rhs", "accumulator"),
    [("int8", "int8", "int32"), ("uint8", "int8", "int32"), ("bfloat16", "bfloat16", "float32")],
)
def test_every_layout_of_a_weight_in_turn(lhs, rhs, accumulator, bound):
    """From this CPU to c, to AVX2 and back: with column sums and without, k in tiles of 1, 2 and 4."""
    sizes = f"<{lhs} * {rhs} -> {accumulator}; (m, k) * (k, n) -> (m, n); m=?, n=37, k=11>"
    scope = {"I": I, "R": R, "V3": V3, "NATIVE": rh.native("llvm")}
    mod = tvm.script.from_source(_TYPED.format(lhs=lhs, rhs=rhs, sizes=sizes), scope)
    rng = np.random.default_rng(6)

    def random(dtype, *shape):
        if "int" not in dtype:
            return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)

    w = random(rhs, 11, 37)
    weight = tvm.runtime.tensor(w)
    vm = rh.vm.VirtualMachine(compiled(mod, **({"w": weight} if bound else {})))
    for m in (1, 6, 33):
        x = random(lhs, m, 11)
        got = vm["main"](tvm.runtime.tensor(x), *(() if bound else (weight,))).numpy()
        want = 4 * (x.astype("float64") @ w.astype("float64"))
        np.testing.assert_allclose(got, want, rtol=0, atol=0 if accumulator == "int32" else 1e-4)


def test_a_cuda_device_reads_activations_as_they_lie():
    """Its product is encoded as the CPU's is, and what crosses is row-major on both sides."""

    @ir_module(V4, {"kind": "cuda", "arch": "sm_90"})
    def Mod(x: R.Tensor((4, 6), "float32", "llvm:0"), w: R.Tensor((6, 6), "float32", "llvm:0")):
        with R.dataflow():
            a = R.nn.relu(R.matmul(x, w))
            b = R.matmul(R.to_vdevice(a, "cuda:0"), R.to_vdevice(w, "cuda:0"))
            y = R.to_vdevice(b, "llvm:0")
            R.output(y)
        return y

    steps = [rh.transform.RealizeVDevice(), rh.transform.SetEncoding(), rh.transform.PropagateEncodings()]
    with rh.transform.collect_encodings() as reports:
        mod = tvm.transform.Sequential([*steps, rh.transform.SpecializeEncodings()])(Mod)
    assert [(op.device, op.epilogue) for op in reports[0].ops] == [("llvm:0", "relu(x0)"), ("cuda:0", "")]
    assert not reports[0].cancelled
    ops = Counter(ops_of(mod["main"]))
    assert ops["relax.hetero.matmul"] == 2 and not ops["relax.matmul"] + ops[RELAYOUT]
    assert relax.analysis.well_formed(mod) is not False
