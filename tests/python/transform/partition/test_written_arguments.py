"""Arguments that in-place ops may write to, through any aliases."""

from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_hetero.transform.partition.written_arguments import written_arguments


@I.ir_module
class Mod:
    @T.prim_func(private=True, s_tir=True)
    def bump(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.evaluate(0)

    @R.function
    def views(x: R.Tensor((2, 2), "float32"), y: R.Tensor((4,), "float32"), z: R.Tensor((4,), "float32")):
        cls = Mod
        flat: R.Tensor((4,), "float32") = R.reshape(x, R.shape([4]))
        pair = (y, flat)
        again = pair[1]
        a = R.call_tir_inplace(cls.bump, (again, z), inplace_indices=[0], out_ty=R.Tensor((4,), "float32"))
        return a

    @R.function
    def copies(x: R.Tensor((4,), "float32")):
        cls = Mod
        y = R.add(x, x)
        a = R.call_tir_inplace(cls.bump, (y, x), inplace_indices=[0], out_ty=R.Tensor((4,), "float32"))
        b = R.call_tir_inplace(cls.bump, (a, x), inplace_indices=[0], out_ty=R.Tensor((4,), "float32"))
        return b

    @R.function
    def branches(c: R.Tensor((), "bool"), x: R.Tensor((4,), "float32"), y: R.Tensor((4,), "float32")):
        cls = Mod
        if c:
            z: R.Tensor((4,), "float32") = x
        else:
            z: R.Tensor((4,), "float32") = R.exp(y)
        a = R.call_tir_inplace(cls.bump, (z, y), inplace_indices=[0], out_ty=R.Tensor((4,), "float32"))
        return a

    @R.function(pure=False)
    def calls(x: R.Tensor((2, 2), "float32"), y: R.Tensor((4,), "float32")):
        a: R.Tensor((4,), "float32") = Mod.views(x, y, y)
        return a

    @R.function
    def packed(x: R.Tensor((4,), "float32"), y: R.Tensor((4,), "float32")):
        a = R.call_inplace_packed("f", x, y, inplace_indices=[1], ty_args=R.Tensor((4,), "float32"))
        return a


def test_writers():
    assert written_arguments(Mod) == {
        "views": [0, 1],  # a field of a tuple may be any of it
        "copies": [],
        "branches": [1],
        "calls": [0, 1],
        "packed": [1],
    }
