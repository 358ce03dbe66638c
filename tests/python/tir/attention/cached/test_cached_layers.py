"""Layers with caches in one function: one command buffer, caches written where they lie, copies where others read."""

import numpy as np
import tvm
from tvm import relax

import relax_hetero as rh
from modules import ops_of
from relax_hetero.encoding.pages import page_bytes, page_shape
from tir.attention.cached.cached_cases import Case, vdevice_of

LAYERS, PAGES, SLOTS, MOST = 18, 40, 2, 5
CASE = Case(heads=4, kv_heads=1, size=64, rows="decode")


def layers(count=LAYERS):
    """Attention and a product, several times; results are the last product and all caches."""
    where = vdevice_of("llvm")

    def param(name, shape, dtype):
        return relax.Var(name, relax.TensorType(shape, dtype, where))

    x, weight = param("x", (1, CASE.width), "float32"), param("weight", (CASE.heads * CASE.size, CASE.width), "float32")
    table = param("table", (SLOTS, MOST), "int32")
    places = [param(name, (1,), "int32") for name in ("sequences", "positions")]
    shape = page_shape(PAGES, CASE.kv_heads, CASE.size)
    caches = [param(f"pages_{i}", shape, "float16") for i in range(count)]
    builder, y, new = relax.BlockBuilder(), x, []
    with builder.function("main", [x, weight, table, *places, *caches]):
        with builder.dataflow():
            for cache in caches:
                both = builder.emit(rh.op.cached_attention(y, cache, table, *places, **CASE.attributes))
                new.append(builder.emit_output(relax.TupleGetItem(both, 1)))
                y = builder.emit(relax.op.matmul(builder.emit(relax.TupleGetItem(both, 0)), weight))
            y = builder.emit_output(y)
        builder.emit_func_output(relax.Tuple([y, *new]))
    mod = builder.get()
    mod.update_global_info("vdevice", [where])
    return mod


def arguments(rng):
    x = rng.standard_normal((1, CASE.width)).astype("float32")
    weight = rng.standard_normal((CASE.heads * CASE.size, CASE.width)).astype("float32") / 16
    table = rng.permutation(PAGES)[: SLOTS * MOST].reshape(SLOTS, MOST).astype("int32")
    return [x, weight, table, np.array([1], "int32"), np.array([0], "int32")]


def test_one_command_buffer_and_no_copies(capsys):
    donated = [f"pages_{i}" for i in range(LAYERS)]
    exe = rh.compile(layers(), donate=donated, cache=False)
    signature = exe.signature("main")
    assert (signature.donated, signature.copied) == (tuple(donated), ())
    exe.explain()
    text = capsys.readouterr().out
    assert f"1 command buffer of {2 * LAYERS} kernel calls in all, 0 kernel calls outside" in text, text
    (memory,) = exe.metadata.memory
    cache_bytes = PAGES * page_bytes(CASE.kv_heads, CASE.size)
    assert sum(storage.nbytes for storage in memory.storages) < cache_bytes
    rng = np.random.default_rng(0)
    args, shape = arguments(rng), page_shape(PAGES, CASE.kv_heads, CASE.size)
    caches = [np.full(shape, np.nan, "float16") for _ in donated]
    result = rh.vm.VirtualMachine(exe)["main"](*args, *caches)
    for new, cache in zip(result[1:], caches, strict=True):
        assert np.from_dlpack(new).ctypes.data == cache.ctypes.data
    y = args[0].astype("float64")
    for cache in caches:  # a query that sees one key gets that key's value
        value = y[:, -CASE.size :].astype("float16").astype("float64")
        y = np.tile(value, CASE.heads) @ args[1].astype("float64")
        written = np.isfinite(cache).sum()
        assert written == 2 * CASE.size, "one token is written"
    np.testing.assert_allclose(np.from_dlpack(result[0]), y, rtol=1e-3, atol=1e-3)


def test_a_cache_that_is_not_donated_is_unchanged():
    """Arguments that are not donated stay as they are: the call works on a copy."""
    exe = rh.compile(layers(1), cache=False)
    assert exe.signature("main").copied == ("pages_0",)
    cache = np.zeros(page_shape(PAGES, CASE.kv_heads, CASE.size), "float16")
    _, new = rh.vm.VirtualMachine(exe)["main"](*arguments(np.random.default_rng(1)), cache)
    assert not cache.any()
    assert np.from_dlpack(new).any()


def test_isolate_writes_knows_the_op():
    """A value that may share the cache's memory, and is read later, is copied before the op writes."""
    mod = layers(1)
    func = mod["main"]
    cache = func.params[-1]
    block = func.body.blocks[0]
    builder = relax.BlockBuilder()
    shared = relax.DataflowVar("shared", cache.ty)
    view = relax.VarBinding(shared, relax.op.permute_dims(cache, [0, 1, 2]))
    later = relax.Var("later", cache.ty)
    after = relax.VarBinding(later, relax.op.add(shared, shared))
    changed = relax.DataflowBlock([view, *block.bindings, after])
    body = relax.SeqExpr([changed], relax.Tuple([*func.body.body.fields, later]))
    new = relax.Function(func.params, body, tvm.ir.TupleType([*func.ret_ty.fields, cache.ty]))
    mod = tvm.IRModule({"main": builder.normalize(new)}, global_infos=dict(mod.global_infos))
    ops = ops_of(rh.transform.IsolateWrites()(mod))
    assert ops.index("relax.hetero.copy") < ops.index("relax.hetero.cached_attention") < ops.index("relax.add")
