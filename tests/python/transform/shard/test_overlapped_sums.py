"""Products that send what other GPUs add while they compute, and products that cannot."""

import numpy as np
import pytest
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from modules import ir_module
from relax_hetero.tir.cuda.all_reduce import ALL_REDUCE, AllReduce, RankReduce, RowNorm
from relax_hetero.transform.encode.encoding_kernels import EncodingKernels
from relax_hetero.transform.ir.kernels import called_prim_func
from relax_hetero.transform.ir.rewriting import typed, walk_bindings
from relax_hetero.transform.pipeline import pipeline_steps
from relax_hetero.transform.shard.overlapped_sums import overlap_sums

CUDA = {"kind": "cuda", "arch": "sm_90a"}
GPUS = (CUDA, (CUDA, 1))
ROWS, FEW_ROWS, WIDTH, DEPTH = 2048, 32, 4096, 1024
UP, DOWN = np.ones((WIDTH, DEPTH), "float16"), np.ones((DEPTH, WIDTH), "float16")
SCALE = np.ones(WIDTH, "float32")


def before_products(follows, rows=ROWS):
    """Three sums with norms, each of which adds the last; the second's product follows from the first if `follows`."""
    shape = (rows, WIDTH)

    @ir_module(*GPUS)
    def module(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            h = R.astype(x, "float16")
            a = R.add(x, R.matmul(R.matmul(h, R.const(UP)), R.const(DOWN), out_dtype="float32"))
            b = R.astype(R.nn.rms_norm(a, R.const(SCALE), axes=[-1]), "float16")
            read = b if follows else h  # noqa: F841
            c = R.add(a, R.matmul(R.matmul(read, R.const(UP)), R.const(DOWN), out_dtype="float32"))
            d = R.astype(R.nn.rms_norm(c, R.const(SCALE), axes=[-1]), "float16")
            e = R.add(c, R.matmul(R.matmul(d, R.const(UP)), R.const(DOWN), out_dtype="float32"))
            f = R.astype(R.nn.rms_norm(e, R.const(SCALE), axes=[-1]), "float16")
            g = R.add(R.matmul(b, R.const(UP)), R.matmul(f, R.const(UP)))
            R.output(g)
        return g

    module = rh.transform.PartitionByMesh(by_cost=False)(module)
    for step in pipeline_steps():
        if step.name == "MaterializeEncodings":
            return step, module
        module = step.run(module)
    raise AssertionError("MaterializeEncodings is not there")


def sums_of(module, function="main"):
    """Calls of sums in order, each with the call of its product."""
    bindings = list(walk_bindings(module[function]))
    values = {binding.var: binding.value for binding in bindings}
    return [(value, values[value.args[1].fields[0]]) for value in values.values() if is_sum(module, value)]


def is_sum(module, value):
    gv = called_prim_func(module, value)
    return gv is not None and ALL_REDUCE in module[gv].attrs


@pytest.fixture(scope="module")
def following():
    return before_products(follows=True)


SUMS = {
    ROWS: (
        "rh_all_reduce_long<2, 512, {rank}, 2, RH_RMS_NORM, true, {keeps}, true, true>",
        "rh_send_tile<{rank}, 2>",
    ),
    FEW_ROWS: ("rh_all_reduce_short<2, 512, {rank}, 2, RH_RMS_NORM, true, {keeps}, true>", "rh_send_words"),
}
"""Functions of a sum's kernel and of its product's, by their number of rows."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", SUMS)
def test_products_send_the_operands_of_sums(following, rows):
    """Those of the first sum, too: they are after the last call's sums."""
    step, before = following if rows == ROWS else before_products(True, rows)
    after = step.run(before)
    assert_structural_equal(step.run(after), after)
    names = [(call.args[0].name_hint, product.args[0].name_hint) for call, product in sums_of(after)]
    assert [("_sent" in call, "_sent" in product) for call, product in names] == [(True, True)] * 6
    for (call, product), (unsent, _), rank in zip(sums_of(after), sums_of(before), (0, 1) * 3, strict=True):
        addresses = product.args[1].fields[2]
        assert addresses.same_as(call.args[1].fields[1])
        assert len(call.args[1].fields) == len(unsent.args[1].fields)
        keeps = str(hasattr(call.ty, "fields")).lower()  # of short sums the first GPU, which adds it to the next one
        for gv, name in zip((call.args[0], product.args[0]), SUMS[rows], strict=True):
            assert f'"{name.format(rank=rank, keeps=keeps)}"' in after[gv].script()


def test_products_of_a_decode_step_send(tmp_path, free_exchanges):
    """Of one row, by 4-bit weights (attention's output) and 16-bit ones; a vocabulary's candidates are gathered."""
    types = {"*attn_output.weight": "Q4_0", "*": "F16"}
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"], types)
    after = rh.from_gguf(path, [dict(CUDA), dict(CUDA)], {"*": "cuda[0:2]"}, context=64)
    for step in pipeline_steps():
        after = step.run(after)
        if step.name == "MaterializeEncodings":
            break
    kernels = [(call.args[0].name_hint, product) for call, product in sums_of(after, "decode_1")]
    names = [product.args[0].name_hint for kernel, product in kernels if kernel.endswith("_sent")]
    assert [name.split("_1x")[0] for name in names] == ["block_matmul", "block_matmul", "matmul", "matmul"] * 2
    assert all(name.endswith("_sent") for name in names) and len(kernels) == len(names) + 2


def test_all_gpus_send_or_none(following, monkeypatch):
    step, before = following
    sending = EncodingKernels.sending
    monkeypatch.setattr(
        EncodingKernels, "sending", lambda self, gv, sent: sending(self, gv, sent) if sent.rank == 0 else None
    )
    for call, product in sums_of(step.run(before)):
        assert "_sent" not in call.args[0].name_hint + product.args[0].name_hint


def test_a_product_that_others_read_does_not_send(following, monkeypatch):
    def with_reader(func, mod, kernels):
        [*_, last] = (binding.value for binding in walk_bindings(func) if is_sum(mod, binding.value))
        part, block = last.args[1].fields[0], func.body.blocks[0]
        read = relax.VarBinding(relax.DataflowVar("read", part.ty), typed(relax.op.negative(part), part.ty))
        body = relax.SeqExpr([relax.DataflowBlock([*block.bindings, read])], func.body.body)
        return overlap_sums(relax.Function(func.params, body, func.ret_ty, attrs=func.attrs), mod, kernels)

    step, before = following
    monkeypatch.setattr("relax_hetero.transform.encode.materialize_encodings.overlap_sums", with_reader)
    calls = sums_of(step.run(before))
    assert ["_sent" in call.args[0].name_hint for call, _ in calls] == [True] * 4 + [False] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", SUMS)
def test_a_product_that_may_run_before_the_last_sum_does_not_send(rows):
    step, before = before_products(False, rows)
    calls = sums_of(step.run(before))
    is_sent = [True] * 2 + [False] * 2 + [True] * 2
    assert ["_sent" in call.args[0].name_hint for call, _ in calls] == is_sent
    assert ["_sent" in product.args[0].name_hint for _, product in calls] == is_sent


@pytest.mark.parametrize(
    ("shape", "dtype", "is_sent"),
    [
        ((2048, 4096), "float16", True),
        ((2048, 4096), "float32", False),  # rows are sent as they are
        ((2048, 4096), "", False),
        ((64, 1024), "float16", True),  # short
        ((3, 68), "", True),
        ((2048, 4160), "float16", False),  # no whole tiles
        ((1920, 4096), "float16", False),
        ((16384, 16384), "float16", False),  # too many flags
    ],
)
def test_sums_that_products_send_for(shape, dtype, is_sent):
    reduce = AllReduce(shape, 2, RowNorm(1e-5, dtype) if dtype else None)
    own = RankReduce(reduce, 1, True, 2, 1 << 30)
    assert RankReduce.from_json(own.to_json()) == own
    sent = own.sent
    assert (sent is not None) == is_sent
    if is_sent:
        assert (sent.rank, sent.ranks, sent.slot, sent.slot_bytes) == (1, 2, 2, 1 << 30)
