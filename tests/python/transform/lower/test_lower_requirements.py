"""LowerRequirements: one call checks all requirements of a point, before anything is allocated."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module, values_of
from relax_hetero.transform import LowerRequirements
from relax_hetero.transform.ir.rewriting import op_name
from relax_hetero.transform.lower.lower_requirements import as_float

N = tirx.Var("n", "int64")
N_OF_X, M_OF_Y = "n is dimension 0 of argument 'x'", "m is dimension 0 of argument 'y'"


def test_checks_stand_where_their_sizes_are_known():
    @ir_module(pure=False)
    def Before(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("m", 4), "float32")):
        n = T.int64()
        m = T.int64()
        found = T.int64()
        places = R.nonzero(x)
        R.hetero.require(n == m, "same rows")
        same = R.match_cast(places, R.Tensor((2, found), "int64"))
        many = R.add(same, same)
        R.hetero.require(T.And(found <= m, n < 8), "few")
        R.hetero.require(T.Or(n == 0, m % n == 0), "whole")
        R.hetero.require(n >= 0, "always")
        return many

    @I.ir_module
    class Expected:
        @T.prim_func
        def main_sizes(n: T.int64, m: T.int64):
            T.func_attr({"global_symbol": "main_sizes", "relax_hetero.divisors_checked": True})
            if not n == m:
                T.call_packed("relax_hetero.refuse_sizes", "main", "same rows", N_OF_X, n, M_OF_Y, m)
            if not n == T.int64(0):
                if n == T.int64(0):
                    T.call_packed("relax_hetero.refuse_sizes", "main", "whole", N_OF_X, n, M_OF_Y, m)
                else:
                    if not m % n == T.int64(0):
                        T.call_packed("relax_hetero.refuse_sizes", "main", "whole", N_OF_X, n, M_OF_Y, m)

        @T.prim_func
        def main_sizes_1(found: T.int64, m: T.int64, n: T.int64):
            T.func_attr({"global_symbol": "main_sizes_1", "relax_hetero.divisors_checked": True})
            if not found <= m:
                T.call_packed("relax_hetero.refuse_sizes", "main", "few", "found", found, M_OF_Y, m, N_OF_X, n)
            if not n < T.int64(8):
                T.call_packed("relax_hetero.refuse_sizes", "main", "few", "found", found, M_OF_Y, m, N_OF_X, n)

        @R.function(pure=False)
        def main(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("m", 4), "float32")):
            n = T.int64()
            m = T.int64()
            found = T.int64()
            cls = Expected
            cls.main_sizes(n, m)
            places = R.nonzero(x)
            same = R.match_cast(places, R.Tensor((2, found), "int64"))
            cls.main_sizes_1(found, m, n)
            many = R.add(same, same)
            return many

    after = LowerRequirements()(Before)
    assert_structural_equal(after, Expected)
    assert_structural_equal(LowerRequirements()(after), after)


def test_a_branch_keeps_its_own():
    @ir_module(pure=False)
    def Before(x: R.Tensor(("n",), "float32"), flag: R.Tensor((), "bool")):
        n = T.int64()
        if flag:
            R.hetero.require(n == 2, "two")
            y = R.exp(x)
        else:
            y = R.tanh(x)
        return y

    after = LowerRequirements()(Before)
    (branches,) = (value for value in values_of(after) if isinstance(value, relax.If))
    check, exp = values_of(branches.true_branch)
    assert check.op.name_hint == "main_sizes" and op_name(exp) == "relax.exp"


def test_nothing_to_do():
    @ir_module(pure=False)
    def Before(x: R.Tensor(("n",), "float32")):
        y = R.exp(x)
        return y

    assert LowerRequirements()(Before).same_as(Before)


def test_large_allocations_are_compared_with_the_memory_of_the_host():
    def table(name, *shape):
        x = relax.Var("x", relax.TensorType([N], "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                result = builder.emit_output(relax.op.zeros(shape, "float32"), name)
            builder.emit_func_output(result)
        return rh.vm.VirtualMachine(rh.compile(builder.get(), cache=False))["main"]

    x = np.zeros(2**19, "float32")  # 2**40 bytes, which no machine of today has
    main = table("square", N, N)
    assert main(x[:4]).shape == (4, 4)
    with pytest.raises(
        rh.MemoryLimitError,
        match=r"^function 'main': 'square' of \(n, n\) float32 takes 1,099,511,627,776 bytes, found .* "
        r"\(n = 524288\); n is dimension 0 of argument 'x'$",
    ):
        main(x)
    assert main(x[:5]).shape == (5, 5)
    with pytest.raises(rh.MemoryLimitError, match=r"'large' of \(524288, 524288\) float32 takes 1,099,511"):
        table("large", 2**19, 2**19)(x[:4])


def test_the_lesser_of_sizes_is_taken_before_it_is_a_float():
    """TVM's simplifier fails on minima of floats whose products are added up: ``min(n, 512) * 8 + ...``."""
    n = tirx.Var("n", "int64")
    least = tirx.min(n, tirx.IntImm("int64", 512))
    tvm.ir.assert_structural_equal(as_float(least), tirx.Cast("float64", least))
    assert isinstance(as_float(tirx.Min(n * n, n)), tirx.Min)
