"""FormCommandBuffers: values that a run reads are operands, values read by others results, the rest in an arena.

The expected modules show functions of Relax; the host functions in them only have the right parameters.
"""

from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from transform.outlines import V4, called, check


def test_operands_results_and_arena():
    """`a` is transient; `b` is used inside and outside, `c` twice outside."""

    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def one(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.evaluate(0)

        @T.prim_func(private=True, s_tir=True)
        def sum(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0"), y: R.Tensor((4,), "float32", "llvm:0")):
            cls = Before
            with R.dataflow():
                a = R.call_tir(cls.one, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                b = R.call_tir(cls.sum, (a, y), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                c = R.call_tir(cls.sum, (b, x), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                gv = (c, b, c)
                R.output(gv)
            return gv

    @ir_module(V4)
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def main_commands(
            x: T.Buffer((T.int64(4),), "float32"),
            y: T.Buffer((T.int64(4),), "float32"),
            b: T.Buffer((T.int64(4),), "float32"),
            c: T.Buffer((T.int64(4),), "float32"),
            arena: T.Buffer((T.int64(64),), "uint8"),
        ):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0"), y: R.Tensor((4,), "float32", "llvm:0")):
            cls = Expected
            with R.dataflow():
                buffer = R.call_tir(
                    cls.main_commands,
                    (x, y),
                    out_ty=[
                        R.Tensor((4,), "float32", "llvm:0"),
                        R.Tensor((4,), "float32", "llvm:0"),
                        R.Tensor((64,), "uint8", "llvm:0"),
                    ],
                )
                b: R.Tensor((4,), "float32", "llvm:0") = buffer[0]
                c: R.Tensor((4,), "float32", "llvm:0") = buffer[1]
                gv = (c, b, c)
                R.output(gv)
            return gv

    after = check(Before, Expected)
    assert called(after, "main_commands") == ["one", "sum", "sum"]
    assert str(after["one"].ret_type) == "int32" and len(after["one"].params) == 2


def test_one_result_and_no_arena():
    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def both(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Before
            a = R.call_tir(cls.both, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            b = R.call_tir(cls.both, (a,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            return (a, b)

    @ir_module(V4)
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def main_commands(
            x: T.Buffer((T.int64(4),), "float32"),
            a: T.Buffer((T.int64(4),), "float32"),
            b: T.Buffer((T.int64(4),), "float32"),
        ):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Expected
            buffer = R.call_tir(
                cls.main_commands,
                (x,),
                out_ty=[R.Tensor((4,), "float32", "llvm:0"), R.Tensor((4,), "float32", "llvm:0")],
            )
            a: R.Tensor((4,), "float32", "llvm:0") = buffer[0]
            b: R.Tensor((4,), "float32", "llvm:0") = buffer[1]
            return (a, b)

    check(Before, Expected)


def test_tuples_and_views():
    """A field used inside only is transient; a view of an operand is the operand; views used outside are made there."""

    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def parts(A: T.Buffer((4,), "int8"), B: T.Buffer((4,), "int8"), C: T.Buffer((4,), "int8")):
            T.evaluate(0)

        @T.prim_func(private=True, s_tir=True)
        def square(A: T.Buffer((2, 2), "int8"), B: T.Buffer((2, 2), "int8")):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((2, 2), "int8", "llvm:0")):
            cls = Before
            with R.dataflow():
                flat: R.Tensor((4,), "int8", "llvm:0") = R.reshape(x, R.shape([4]))
                p = R.call_tir(
                    cls.parts, (flat,), out_ty=[R.Tensor((4,), "int8", "llvm:0"), R.Tensor((4,), "int8", "llvm:0")]
                )
                inside = p[0]
                outside = p[1]
                shaped: R.Tensor((2, 2), "int8", "llvm:0") = R.reshape(inside, R.shape([2, 2]))
                q = R.call_tir(cls.square, (shaped,), out_ty=R.Tensor((2, 2), "int8", "llvm:0"))
                r = R.call_tir(
                    cls.parts, (outside,), out_ty=[R.Tensor((4,), "int8", "llvm:0"), R.Tensor((4,), "int8", "llvm:0")]
                )
                line: R.Tensor((4,), "int8", "llvm:0") = R.reshape(q, R.shape([4]))
                same = line
                gv = (r, outside, same, q)
                R.output(gv)
            return gv

    @ir_module(V4)
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def main_commands(
            x: T.Buffer((T.int64(2), T.int64(2)), "int8"),
            p_1: T.Buffer((T.int64(4),), "int8"),
            q: T.Buffer((T.int64(2), T.int64(2)), "int8"),
            r_0: T.Buffer((T.int64(4),), "int8"),
            r_1: T.Buffer((T.int64(4),), "int8"),
            arena: T.Buffer((T.int64(64),), "uint8"),
        ):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((2, 2), "int8", "llvm:0")):
            cls = Expected
            with R.dataflow():
                buffer = R.call_tir(
                    cls.main_commands,
                    (x,),
                    out_ty=[
                        R.Tensor((4,), "int8", "llvm:0"),
                        R.Tensor((2, 2), "int8", "llvm:0"),
                        R.Tensor((4,), "int8", "llvm:0"),
                        R.Tensor((4,), "int8", "llvm:0"),
                        R.Tensor((64,), "uint8", "llvm:0"),
                    ],
                )
                outside: R.Tensor((4,), "int8", "llvm:0") = buffer[0]
                q: R.Tensor((2, 2), "int8", "llvm:0") = buffer[1]
                r_0: R.Tensor((4,), "int8", "llvm:0") = buffer[2]
                r_1: R.Tensor((4,), "int8", "llvm:0") = buffer[3]
                r = (r_0, r_1)
                whole: R.Tensor((2, 2), "int8", "llvm:0") = buffer[1]
                same: R.Tensor((4,), "int8", "llvm:0") = R.reshape(whole, R.shape([4]))
                gv = (r, outside, same, q)
                R.output(gv)
            return gv

    check(Before, Expected)


def test_symbols():
    """`n` is said by an operand's extent, `m` by none: it is passed, and so is the number."""

    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def times(a: T.handle, k: T.int64, b: T.handle):
            n = T.int64()
            A = T.match_buffer(a, (n,), "float16")
            B = T.match_buffer(b, (n,), "float16")
            T.evaluate(0)

        @R.function
        def main(s: R.Shape(["m"]), x: R.Tensor(("n",), "float16", "llvm:0"), k: R.Prim("int64")):
            n = T.int64()
            m = T.int64()
            cls = Before
            with R.dataflow():
                a = R.call_tir(cls.times, (x, k), out_ty=R.Tensor((n,), "float16", "llvm:0"))
                b = R.call_tir(cls.times, (a, m), out_ty=R.Tensor((n,), "float16", "llvm:0"))
                R.output(b)
            return b

    @ir_module(V4)
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def main_commands(x: T.handle, k: T.int64, m: T.int64, b: T.handle, arena: T.handle):
            n = T.int64()
            X = T.match_buffer(x, (n,), "float16")
            B = T.match_buffer(b, (n,), "float16")
            A = T.match_buffer(arena, ((n * T.int64(2) + T.int64(63)) // T.int64(64) * T.int64(64),), "uint8")
            T.evaluate(0)

        @R.function
        def main(s: R.Shape(["m"]), x: R.Tensor(("n",), "float16", "llvm:0"), k: R.Prim("int64")):
            n = T.int64()
            m = T.int64()
            cls = Expected
            with R.dataflow():
                buffer = R.call_tir(
                    cls.main_commands,
                    (x, k, m),
                    out_ty=[
                        R.Tensor((n,), "float16", "llvm:0"),
                        R.Tensor(((n * 2 + 63) // 64 * 64,), "uint8", "llvm:0"),
                    ],
                )
                b: R.Tensor((n,), "float16", "llvm:0") = buffer[0]
                R.output(b)
            return b

    check(Before, Expected)
