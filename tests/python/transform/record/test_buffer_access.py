"""Which parameters a PrimFunc reads and writes."""

from tvm.script import ir as I
from tvm.script import tirx as T

from relax_hetero.transform.record.region_attrs import buffer_access


@I.ir_module
class Kernels:
    @T.prim_func
    def plain(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32"), s: T.float32):
        for i in range(4):
            B[i] = A[i] * s
            C[i] = C[i] + A[i]

    @T.prim_func
    def handed_on(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
        for i in range(4):
            C[i] = A[i]
        T.evaluate(T.call_extern("int32", "memset", B.data, 0, 16))

    @T.prim_func(s_tir=True)
    def blocks(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("double"):
                v = T.axis.spatial(4, i)
                T.reads(A[v])
                T.writes(B[v])
                B[v] = A[v] * T.float32(2)
        for i in range(4):
            with T.sblock("part"):
                v = T.axis.spatial(4, i)
                one = T.match_buffer(C[v : v + 1], (1,), offset_factor=1)
                one[0] = A[v]


def access(name):
    func = Kernels[name]
    accesses = buffer_access(func)
    return {param.name: accesses[param] for param in func.params if param.name != "s"}


def test_elements_read_and_written():
    assert access("plain") == {"A": "read", "B": "write", "C": "read-write"}


def test_memory_that_is_handed_on_counts_as_both():
    assert access("handed_on") == {"A": "read", "B": "read-write", "C": "write"}


def test_declared_accesses_of_a_block_are_not_accesses():
    assert access("blocks") == {"A": "read", "B": "write", "C": "read-write"}
