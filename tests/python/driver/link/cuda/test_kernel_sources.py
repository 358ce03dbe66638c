"""CUDA kernels without a GPU: a source for each, machine code of the named architecture, reports of ptxas."""

import struct
import threading

import pytest
import tvm
from tvm.script import tirx as T

from cuda_reports import compile_source, parse_reports, reports_of, sources_of
from relax_hetero.driver.link.cuda import kernel_sources
from relax_hetero.driver.link.cuda.kernel_sources import generate, is_source

SM90A = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})


@T.prim_func(s_tir=True)
def two(A: T.Buffer((64,), "float16"), B: T.Buffer((64,), "float32"), C: T.Buffer((64,), "float16")):
    T.func_attr({"global_symbol": "two"})
    with T.sblock("root"):
        for t in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("B"):
                i = T.axis.spatial(64, t)
                B[i] = T.exp(T.cast(A[i], "float32"))
        for t in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("C"):
                i = T.axis.spatial(64, t)
                C[i] = T.cast(B[i], "float16")


def test_each_kernel_has_a_source():
    sources = sources_of(two, SM90A)
    assert [source.names for source in sources] == [("two_kernel",), ("two_kernel_1",)]
    for source in sources:
        assert source.text.count("__global__") == 2  # declared and defined
        assert source.arch == "sm_90a"
        assert is_source(source.data) or source.data.format == "cubin"


@tvm.ir.instrument.pass_instrument
class Counted:
    """Counts passes, in the thread that runs them."""

    def __init__(self):
        self.threads = []

    def run_before_pass(self, _mod, _info):
        self.threads.append(threading.get_ident())


def test_sources_of_threads_are_those_of_one_thread_with_instruments():
    group = tvm.IRModule({name: two.with_attr("global_symbol", name) for name in ("one", "two", "three")})
    target, counted = SM90A.with_host("llvm"), Counted()
    part = generate(group, target)
    with tvm.transform.PassContext(instruments=[counted]):
        expected = generate(group, target)
    assert [source.text for source in part.sources] == [source.text for source in expected.sources]
    assert len(part.sources) == 6 and set(counted.threads) == {threading.get_ident()}


def test_host_functions_are_compiled_in_several_modules(monkeypatch):
    """Each module imports the kernels that its functions launch."""
    group = tvm.IRModule({name: two.with_attr("global_symbol", name) for name in ("one", "two", "three")})
    monkeypatch.setattr(kernel_sources, "HOST_FUNCTIONS_PER_MODULE", 1)
    part = generate(group, SM90A.with_host("llvm"))
    launched = [{"one_kernel", "one_kernel_1"}, {"three_kernel", "three_kernel_1"}, {"two_kernel", "two_kernel_1"}]
    assert [code.launched for code in part.codes] == launched
    assert all(part.host.implements_function(name, query_imports=True) for name in ("one", "two", "three"))
    (first, *_) = part.sources
    [launching] = part.launching(first)
    assert launching.implements_function(first.names[0].partition("_")[0])


def test_host_functions_that_call_each_other_stay_together(monkeypatch):
    @T.prim_func(s_tir=True)
    def caller(A: T.handle):
        T.func_attr({"global_symbol": "caller"})
        T.call_packed("two", A)

    monkeypatch.setattr(kernel_sources, "HOST_FUNCTIONS_PER_MODULE", 1)
    part = generate(tvm.IRModule({"two": two, "caller": caller}), SM90A.with_host("llvm"))
    assert len(part.codes) == 1 and part.host.implements_function("caller")


def test_machine_code_is_of_the_architecture_that_the_target_names():
    (source, *_) = sources_of(two, SM90A)
    code = compile_source(source).code
    assert code[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", code, 18)
    assert machine == 190  # EM_CUDA
    assert b"two_kernel" in code and b"sm_90a" in code


def test_reports_of_ptxas():
    first, second = reports_of(two, SM90A)
    assert (first.name, second.name) == ("two_kernel", "two_kernel_1")
    assert 0 < first.registers < 32 and first.stack == first.spill_stores == first.spill_loads == 0


SERIALIZED = """ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
insufficient register resources for the wgmma pipeline in the function 'product'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'product' for 'sm_90a'
ptxas info    : Function properties for product
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 24 registers
"""


def test_serialized_wgmma_is_reported_with_its_kernel():
    other, product = parse_reports(SERIALIZED)
    assert (product.registers, product.shared) == (168, 1024) and "insufficient register" in product.serialized
    assert (other.stack, other.spill_stores, other.spill_loads) == (8, 4, 12) and not other.serialized


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_other_architectures(arch):
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    assert all(report.registers for report in reports_of(two, target))
