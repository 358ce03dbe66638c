"""The registry of resolvers, and one of a third party."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from relax_hetero.encoding import (
    Encoding,
    EncodingResolver,
    MatmulProblem,
    Operand,
    PackedLayout,
    register_resolver,
    resolver_for,
)
from relax_hetero.encoding.resolver import resolver_or_default
from relax_hetero.errors import EncodingError

X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}


class Transposing(EncodingResolver):
    """Third-party resolver: the right operand transposed, the others unchanged, a kernel of dot products."""

    name = "transposing"

    def resolve(self, encoding, target):
        """Identity, and k innermost for the right operand."""
        if encoding.op_type != "matmul" or set(encoding.element_types) != {"float32"}:
            return None
        rank = len(encoding.index_map)
        if encoding.operand_index != 1:
            return PackedLayout.identity(rank)
        return PackedLayout((encoding.index_map.index("n"), encoding.index_map.index("k")))

    def kernel(self, problem, target):
        """Three loops."""
        (m, k), n = problem.lhs.shape, problem.result.shape[1]
        with IRBuilder() as builder, T.prim_func(s_tir=True):
            T.func_name("dots")
            T.func_attr({"global_symbol": "dots", "tirx.noalias": True})
            lhs = T.arg("lhs", T.buffer((m, k), "float32"))
            rhs = T.arg("rhs", T.buffer((n, k), "float32"))
            result = T.arg("result", T.buffer((m, n), "float32"))
            with T.sblock("root"), T.grid(m, n) as (i, j):
                T.buffer_store(result, T.float32(0), [i, j])
                with T.serial(k) as q:
                    T.buffer_store(result, result[i, j] + lhs[i, q] * rhs[j, q], [i, j])
        return builder.get()


@pytest.fixture
def registered():
    """Undo registrations after the test."""
    undo = []

    def register(*args, **kwargs):
        undo.append(register_resolver(*args, **kwargs))
        return undo[-1]

    yield register
    for take_back in undo:
        take_back()


def _name(target):
    return resolver_for(tvm.target.Target(target)).name


class Named(Transposing):
    """Only a name."""

    def __init__(self, name):
        self.name = name


def test_ours():
    assert _name({**X86, "mcpu": "x86-64-v4"}) == _name({**X86, "mcpu": "x86-64-v3"}) == _name(X86) == "cpu"
    assert _name({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]}) == "cpu"
    assert _name({"kind": "llvm", "mtriple": "riscv64-linux-gnu"}) == _name("c") == "generic"
    assert _name({"kind": "cuda", "arch": "sm_90"}) == "cuda"


def test_a_kind_without_resolvers():
    assert resolver_for("vulkan") is None


def test_priority_then_features_then_the_latest(registered):
    target = {**X86, "mcpu": "x86-64-v4"}
    registered(Named("no features"), "llvm")
    assert _name(target) == "cpu"
    registered(Named("two features"), "llvm", ["avx512f", "avx512bw"])
    assert _name(target) == "two features"
    registered(Named("two others"), "llvm", ["avx2", "fma"])
    assert _name(target) == "two others"
    registered(Named("priority"), "llvm", priority=1)
    assert _name(target) == "priority"
    assert _name("c") == "generic"


def test_features_that_a_target_lacks(registered):
    registered(Named("amx"), "llvm", ["amx-int8"], priority=5)
    assert _name({**X86, "mcpu": "x86-64-v4"}) == "cpu"
    assert _name({**X86, "mcpu": "sapphirerapids"}) == "amx"


def test_rows_and_keys_are_features(registered):
    registered(Named("row"), "llvm", ["isa=sse", "cpu"], priority=1)
    assert _name(X86) == "row"
    assert _name({**X86, "mcpu": "x86-64-v3"}) == "cpu"


def test_taking_back(registered):
    take_back = registered(Named("gone"), "llvm", priority=9)
    assert _name(X86) == "gone"
    take_back()
    assert _name(X86) == "cpu"
    take_back()  # harmless a second time


def test_an_object_of_another_class_is_refused():
    with pytest.raises(EncodingError, match="expected an object of a class of EncodingResolver"):
        register_resolver(object(), "llvm")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resolve_activations", "did you mean 'resolve_activation'"),
        ("cachekey", "did you mean 'cache_key'"),
        ("tuning", "names of your own begin with '_'"),
    ],
)
def test_a_name_that_resolvers_do_not_have_is_refused(name, hint):
    misspelt = type("Misspelt", (Transposing,), {name: ""})()
    with pytest.raises(EncodingError, match=f"'transposing' has '{name}', expected.*{hint}"):
        register_resolver(misspelt, "llvm")
    plain = Named("plain")
    setattr(plain, name, "")
    with pytest.raises(EncodingError, match=hint):
        register_resolver(plain, "llvm")


def test_defaults_decline_and_store_by_layout():
    encoding = Encoding.parse("matmul[1]<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=3, n=5, k=7>")
    resolver, target = Transposing(), tvm.target.Target(X86)
    assert resolver.storage_size(encoding, (7, 5), target) == 7 * 5 * 4
    assert resolver.resolve_activation(encoding, target) == resolver.resolve(encoding, target)
    assert resolver.block_layout(target) is None
    assert resolver_or_default(tvm.target.Target("vulkan")).resolve(encoding, target) is None


def test_a_third_party_answers_and_its_kernel_computes(registered):
    registered(Transposing(), "llvm", priority=1)
    target = tvm.target.Target("llvm")
    encoding = Encoding.parse("matmul[0]<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=3, n=5, k=7>")
    resolver = resolver_for(target)
    assert isinstance(resolver, EncodingResolver)
    assert resolver.resolve(Encoding.parse(str(encoding).replace("float32", "float64")), target) is None
    operands = []
    for index in range(3):
        own = encoding.of(index)
        operands.append(Operand(own.shape(), own.element_type, own.index_map, resolver.resolve(own, target)))
    kernel = resolver.kernel(MatmulProblem(*operands, "float32"), target)
    rng = np.random.default_rng(5)
    lhs, rhs = rng.integers(-9, 9, (3, 7)).astype("float32"), rng.integers(-9, 9, (7, 5)).astype("float32")
    result = tvm.runtime.tensor(np.full((3, 5), np.nan, "float32"))
    executable = tvm.compile(tvm.IRModule({"dots": kernel}), target=target)
    executable["dots"](tvm.runtime.tensor(lhs), tvm.runtime.tensor(operands[1].layout.pack(rhs)), result)
    np.testing.assert_array_equal(result.numpy(), lhs @ rhs)
