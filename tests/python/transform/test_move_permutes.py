"""MovePermutes: permutations meet and cancel; ops that need the program's order get it, once."""

from functools import partial

import numpy as np
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import check_pass, ir_module, ops_of
from relax_hetero.transform import MovePermutes, collect_fusions


def permutes(mod, name="main"):
    """How many permutations a function has."""
    return ops_of(mod[name]).count("relax.permute_dims")


check = partial(check_pass, MovePermutes())


def test_a_pair_cancels_through_order_independent_ops():
    @ir_module("llvm")
    def Before(x: R.Tensor((1, 8, 8, 4), "float32", "llvm:0")):
        with R.dataflow():
            a: R.Tensor((1, 4, 8, 8), "float32", "llvm:0") = R.permute_dims(x, axes=[0, 3, 1, 2])
            b: R.Tensor((1, 4, 8, 8), "float32", "llvm:0") = R.nn.relu(a)
            c: R.Tensor((1, 4, 4, 4), "float32", "llvm:0") = R.nn.max_pool2d(b, [2, 2], strides=[2, 2])
            gv: R.Tensor((1, 4, 4, 4), "float32", "llvm:0") = R.permute_dims(c, axes=[0, 2, 3, 1])
            R.output(gv)
        return gv

    @ir_module("llvm")
    def Expected(x: R.Tensor((1, 8, 8, 4), "float32", "llvm:0")):
        with R.dataflow():
            b: R.Tensor((1, 8, 8, 4), "float32", "llvm:0") = R.nn.relu(x)
            c: R.Tensor((1, 4, 4, 4), "float32", "llvm:0") = R.nn.max_pool2d(
                b, [2, 2], strides=[2, 2], layout="NHWC", out_layout="NHWC"
            )
            gv: R.Tensor((1, 4, 4, 4), "float32", "llvm:0") = c
            R.output(gv)
        return gv

    check(Before, Expected)


def test_the_smaller_operand_is_permuted():
    @ir_module()
    def Before(x: R.Tensor((1, 8, 8, 4), "float32"), y: R.Tensor((1, 2, 8, 8), "float32")):
        with R.dataflow():
            a: R.Tensor((1, 4, 8, 8), "float32") = R.permute_dims(x, axes=[0, 3, 1, 2])
            b: R.Tensor((1, 6, 8, 8), "float32") = R.concat((a, y), axis=1)
            gv: R.Tensor((1, 8, 8, 6), "float32") = R.permute_dims(b, axes=[0, 2, 3, 1])
            R.output(gv)
        return gv

    @ir_module()
    def Expected(x: R.Tensor((1, 8, 8, 4), "float32"), y: R.Tensor((1, 2, 8, 8), "float32")):
        with R.dataflow():
            y1: R.Tensor((1, 8, 8, 2), "float32") = R.permute_dims(y, axes=[0, 2, 3, 1])
            b: R.Tensor((1, 8, 8, 6), "float32") = R.concat((x, y1), axis=3)
            gv: R.Tensor((1, 8, 8, 6), "float32") = b
            R.output(gv)
        return gv

    check(Before, Expected)


def test_a_kernel_gets_the_order_of_the_program_and_others_do_not():
    @I.ir_module
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.Buffer((T.int64(2), T.int64(3)), "float32"), b: T.Buffer((T.int64(2), T.int64(3)), "float32")):
            for i, j in T.grid(T.int64(2), T.int64(3)):
                with T.sblock("b"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    b[vi, vj] = a[vi, vj]

        @R.function
        def main(x: R.Tensor((3, 2), "float32")):
            cls = Before
            with R.dataflow():
                a: R.Tensor((2, 3), "float32") = R.permute_dims(x)
                b: R.Tensor((2, 3), "float32") = R.exp(a)
                c = R.call_tir(cls.kernel, (b,), out_ty=R.Tensor((2, 3), "float32"))
                d: R.Tensor((3, 2), "float32") = R.permute_dims(b)
                R.output(c, d)
            return (c, d)

    @I.ir_module
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.Buffer((T.int64(2), T.int64(3)), "float32"), b: T.Buffer((T.int64(2), T.int64(3)), "float32")):
            for i, j in T.grid(T.int64(2), T.int64(3)):
                with T.sblock("b"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    b[vi, vj] = a[vi, vj]

        @R.function
        def main(x: R.Tensor((3, 2), "float32")):
            cls = Expected
            with R.dataflow():
                b1: R.Tensor((3, 2), "float32") = R.exp(x)
                b: R.Tensor((2, 3), "float32") = R.permute_dims(b1, axes=[1, 0])
                c = R.call_tir(cls.kernel, (b,), out_ty=R.Tensor((2, 3), "float32"))
                d: R.Tensor((3, 2), "float32") = b1
                R.output(c, d)
            return (c, d)

    with collect_fusions() as report:
        check(Before, Expected)
    assert [(each.function, each.variable, each.op) for each in report.missed] == [("main", "c", "call_tir")]
    assert "24 bytes are permuted" in report.missed[0].reason


def test_growing_values_are_permuted_before_they_grow():
    @ir_module()
    def Before(x: R.Tensor((1, 4, 4, 3), "float32")):
        with R.dataflow():
            a: R.Tensor((1, 3, 4, 4), "float32") = R.permute_dims(x, axes=[0, 3, 1, 2])
            gv: R.Tensor((1, 3, 8, 8), "float32") = R.image.resize2d(a, R.shape([8, 8]), layout="NCHW")
            R.output(gv)
        return gv

    assert MovePermutes()(Before).same_as(Before)


def test_only_extents_of_one_move_by_a_reshape():
    @ir_module()
    def Before(x: R.Tensor((1, 4, 4, 3), "float32")):
        with R.dataflow():
            a: R.Tensor((1, 3, 4, 4), "float32") = R.permute_dims(x, axes=[0, 3, 1, 2])
            gv: R.Tensor((1, 3, 1, 1), "float32") = R.mean(a, axis=[2, 3], keepdims=True)
            R.output(gv)
        return gv

    @ir_module()
    def Expected(x: R.Tensor((1, 4, 4, 3), "float32")):
        with R.dataflow():
            a: R.Tensor((1, 1, 1, 3), "float32") = R.mean(x, axis=[1, 2], keepdims=True)
            gv: R.Tensor((1, 3, 1, 1), "float32") = R.reshape(a, R.shape([1, 3, 1, 1]))
            R.output(gv)
        return gv

    check(Before, Expected)


def test_a_channel_shuffle_stays_where_the_channels_are():
    @ir_module()
    def Before(x: R.Tensor((1, 5, 7, 6), "float32")):
        with R.dataflow():
            a: R.Tensor((1, 6, 5, 7), "float32") = R.permute_dims(x, axes=[0, 3, 1, 2])
            b: R.Tensor((1, 2, 3, 5, 7), "float32") = R.reshape(a, R.shape([1, 2, 3, 5, 7]))
            c: R.Tensor((1, 3, 2, 5, 7), "float32") = R.permute_dims(b, axes=[0, 2, 1, 3, 4])
            d: R.Tensor((1, 6, 5, 7), "float32") = R.reshape(c, R.shape([1, 6, 5, 7]))
            gv: R.Tensor((1, 5, 7, 6), "float32") = R.permute_dims(d, axes=[0, 2, 3, 1])
            R.output(gv)
        return gv

    @ir_module()
    def Expected(x: R.Tensor((1, 5, 7, 6), "float32")):
        with R.dataflow():
            b: R.Tensor((1, 5, 7, 2, 3), "float32") = R.reshape(x, R.shape([1, 5, 7, 2, 3]))
            c: R.Tensor((1, 5, 7, 3, 2), "float32") = R.permute_dims(b, axes=[0, 1, 2, 4, 3])
            d: R.Tensor((1, 5, 7, 6), "float32") = R.reshape(c, R.shape([1, 5, 7, 6]))
            gv: R.Tensor((1, 5, 7, 6), "float32") = d
            R.output(gv)
        return gv

    check(Before, Expected)


def test_a_permutation_crosses_with_its_tensor():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((3, 2), "float32", "llvm:0")):
        with R.dataflow():
            a: R.Tensor((2, 3), "float32", "llvm:0") = R.permute_dims(x, axes=[1, 0])
            b: R.Tensor((2, 3), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
            gv: R.Tensor((3, 2), "float32", "llvm:1") = R.permute_dims(b, axes=[1, 0])
            R.output(gv)
        return gv

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((3, 2), "float32", "llvm:0")):
        with R.dataflow():
            b: R.Tensor((3, 2), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
            gv: R.Tensor((3, 2), "float32", "llvm:1") = b
            R.output(gv)
        return gv

    check(Before, Expected)


def test_symbolic_extents_and_a_tuple_taken_apart():
    @ir_module()
    def Before(x: R.Tensor(("n", 8, 4), "float32")):
        n = T.int64()
        with R.dataflow():
            a: R.Tensor((n, 4, 8), "float32") = R.permute_dims(x, axes=[0, 2, 1])
            s: R.Tuple(R.Tensor((n, 2, 8), "float32"), R.Tensor((n, 2, 8), "float32")) = R.split(a, 2, axis=1)
            left: R.Tensor((n, 2, 8), "float32") = s[0]
            right: R.Tensor((n, 2, 8), "float32") = s[1]
            sum: R.Tensor((n, 2, 8), "float32") = R.add(left, right)
            gv: R.Tensor((n, 8, 2), "float32") = R.permute_dims(sum, axes=[0, 2, 1])
            R.output(gv)
        return gv

    @ir_module()
    def Expected(x: R.Tensor(("n", 8, 4), "float32")):
        n = T.int64()
        with R.dataflow():
            s: R.Tuple(R.Tensor((n, 8, 2), "float32"), R.Tensor((n, 8, 2), "float32")) = R.split(x, 2, axis=2)
            left: R.Tensor((n, 8, 2), "float32") = s[0]
            right: R.Tensor((n, 8, 2), "float32") = s[1]
            sum: R.Tensor((n, 8, 2), "float32") = R.add(left, right)
            gv: R.Tensor((n, 8, 2), "float32") = sum
            R.output(gv)
        return gv

    check(Before, Expected)


def test_a_branch_and_a_block_without_dataflow_keep_their_own():
    @ir_module()
    def Before(x: R.Tensor((3, 2), "float32"), c: R.Tensor((), "bool")):
        a: R.Tensor((2, 3), "float32") = R.permute_dims(x, axes=[1, 0])
        if c:
            b: R.Tensor((2, 3), "float32") = R.exp(a)
            d: R.Tensor((2, 3), "float32") = b
        else:
            e: R.Tensor((3, 2), "float32") = R.permute_dims(a, axes=[1, 0])
            f: R.Tensor((3, 2), "float32") = R.exp(e)
            d: R.Tensor((2, 3), "float32") = R.permute_dims(f, axes=[1, 0])
        return d

    after = MovePermutes()(Before)
    assert permutes(after) <= permutes(Before)
    machine = [tvm.relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu()) for mod in (Before, after)]
    x = np.random.default_rng(0).standard_normal((3, 2)).astype("float32")
    for condition in (False, True):
        arguments = [tvm.runtime.tensor(x), tvm.runtime.tensor(np.array(condition))]
        actual, expected = (vm["main"](*arguments).numpy() for vm in machine)
        np.testing.assert_array_equal(actual, expected)


def test_nothing_to_move_nothing_changes():
    @ir_module()
    def Module(x: R.Tensor((3, 2), "float32")):
        with R.dataflow():
            gv: R.Tensor((3, 2), "float32") = R.exp(x)
            R.output(gv)
        return gv

    assert MovePermutes()(Module).same_as(Module)
