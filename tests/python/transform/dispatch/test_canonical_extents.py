"""Canonical extents: equal sizes have the same form."""

import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import check_pass, ir_module
from relax_hetero.transform import FormDispatches, RealizeVDevice
from relax_hetero.transform.dispatch.canonical_extents import canonical_extents


def test_types_and_kernels():
    @I.ir_module
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def twice(a_handle: T.handle, b_handle: T.handle):
            n = T.int64()
            a = T.match_buffer(a_handle, (n,), "float32")
            b = T.match_buffer(b_handle, (3 + n,), "float32")
            for i in range(n):
                with T.sblock("b"):
                    v = T.axis.spatial(n, i)
                    b[v] = a[v] * T.float32(2)

        @R.function
        def main(x: R.Tensor(("n",), "float32"), head: R.Tensor((3,), "float32")):
            n = T.int64()
            y: R.Tensor((3 + n,), "float32") = R.concat((head, x))
            z = R.full(R.shape([2 + n + 1]), R.const(1.0), "float32")
            return (y, z)

    @I.ir_module
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def twice(a_handle: T.handle, b_handle: T.handle):
            n = T.int64()
            a = T.match_buffer(a_handle, (n,), "float32")
            b = T.match_buffer(b_handle, (n + 3,), "float32")
            for i in range(n):
                with T.sblock("b"):
                    v = T.axis.spatial(n, i)
                    b[v] = a[v] * T.float32(2)

        @R.function
        def main(x: R.Tensor(("n",), "float32"), head: R.Tensor((3,), "float32")):
            n = T.int64()
            y: R.Tensor((n + 3,), "float32") = R.concat((head, x))
            z = R.full(R.shape([n + 3]), R.const(1.0), "float32")
            return (y, z)

    check_pass(canonical_extents, Before, Expected)


def test_a_sum_of_a_number_and_a_size_is_fused():
    """FuseTIR takes ``3 + n``, as Relax infers it, and ``n + 3``, as kernels have it, for different sizes."""

    @ir_module()
    def Mod(
        x: R.Tensor(("b", 8, "n"), "float32"), head: R.Tensor(("b", 8, 3), "float32"), w: R.Tensor((4, 8, 4), "float32")
    ):
        with R.dataflow():
            joined = R.concat((head, x), axis=2)
            y = R.nn.conv1d(joined, w)
            z = R.nn.relu(y)
            R.output(joined, z)
        return (joined, z)

    after = FormDispatches()(RealizeVDevice()(Mod))
    kernels = [func for func in after.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    assert len(kernels) == 2
