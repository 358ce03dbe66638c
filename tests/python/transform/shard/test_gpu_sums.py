"""Sums of GPUs by kernels: norms and residuals that become parts of them, and the ones that stay."""

import numpy as np
import pytest
from tvm.script import relax as R

import relax_hetero as rh
from modules import calls_of, ir_module, ops_of
from relax_hetero.tir.cuda.all_reduce import AllReduce, RowNorm
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from relax_hetero.transform.shard.partition_by_mesh import partition_by_mesh

GPUS = ({"kind": "cuda", "arch": "sm_90a"}, ({"kind": "cuda", "arch": "sm_90a"}, 1))
WIDTH = 64
pytestmark = pytest.mark.usefixtures("free_exchanges")
UP = np.random.default_rng(0).standard_normal((WIDTH, 8)).astype("float32")
DOWN = np.random.default_rng(1).standard_normal((8, WIDTH)).astype("float32")
SCALE = np.random.default_rng(2).uniform(0.5, 2, WIDTH).astype("float32")


def layers(rows, eps=1e-5):
    """Two sums with a norm between them, of which the second adds the first as its residual."""
    shape = (rows, WIDTH)

    @ir_module(*GPUS)
    def module(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.add(x, R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN)))
            mean = R.mean(R.multiply(a, a), axis=[-1], keepdims=True)
            normal = R.multiply(a, R.rsqrt(R.add(mean, R.const(eps, "float32"))))
            b = R.astype(R.multiply(normal, R.const(SCALE)), "float16")
            c = R.add(R.matmul(R.matmul(R.astype(b, "float32"), R.const(UP)), R.const(DOWN)), a)
            d = R.matmul(R.nn.softmax(c), R.const(UP))
            R.output(d)
        return d

    return module


def kernels_of(module):
    """Calls of sums by the rank of their GPU, and the module's ops."""
    after = partition_by_mesh(module)
    calls = [call for call in calls_of("relax.call_tir", after) if "all_reduce" in call.args[0].name_hint]
    return calls[0::2], calls[1::2], after


def shapes_of(call):
    types = call.ty.fields if hasattr(call.ty, "fields") else [call.ty]
    return [([int(extent) for extent in ty.shape.values], str(ty.dtype)) for ty in types]


def test_a_norm_becomes_a_part_of_a_short_sum():
    first, second, after = kernels_of(layers(4))
    assert [shapes_of(call) for call in first] == [[([4, 64], "float16"), ([4, 64], "float32")], [([4, 64], "float32")]]
    # Only the first GPU adds the residual, so that the other one does not store the sum.
    assert [shapes_of(call) for call in second] == [[([4, 64], "float16")], [([4, 64], "float32")]]
    assert [len(call.args[1].fields) for call in first] == [4, 3]  # the norm's weight
    ops = ops_of(after)
    assert "relax.rsqrt" not in ops
    assert ops.count("relax.add") == 2  # residuals, in products of the first GPU


def test_long_sums_share_rows_and_keep_residuals():
    first, second, after = kernels_of(layers(4096))
    rows = ([2048, 64], "float32")
    for calls in (first, second):
        assert [shapes_of(call) for call in calls] == [[([4096, 64], "float16"), rows], [([4096, 64], "float32")]]
        part, _, last, residual = calls[1].args[1].fields
        values = {binding.var: binding.value for binding in walk_bindings(after["main"].body)}
        assert op_name(values[part]) == "relax.matmul"
        for number, field in enumerate((last, residual)):  # of the first sum
            assert values[field].index == number
            assert values[values[field].tuple_value].same_as(calls[0])
    assert ops_of(after).count("relax.add") == 1  # the first residual


def layer_norms(rows, form):
    """Sums with layer norms after them, as BERT has: an op, or those of older exporters."""
    shape, bias = (rows, WIDTH), np.float32(0.1) * SCALE

    @ir_module(*GPUS)
    def op(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.add(x, R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN)))
            b = R.nn.layer_norm(a, R.const(SCALE), R.const(bias), axes=[-1])
            c = R.matmul(b, R.const(UP))
            R.output(c)
        return c

    @ir_module(*GPUS)
    def ops(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.add(x, R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN)))
            centered = R.subtract(a, R.mean(a, axis=[-1], keepdims=True))
            variance = R.mean(R.power(centered, R.const(2.0, "float32")), axis=[-1], keepdims=True)
            normal = R.divide(centered, R.sqrt(R.add(variance, R.const(1e-5, "float32"))))
            b = R.add(R.multiply(normal, R.const(SCALE)), R.const(bias))
            c = R.matmul(b, R.const(UP))
            R.output(c)
        return c

    return {"op": op, "ops": ops}[form]


@pytest.mark.parametrize("form", ["op", "ops"])
@pytest.mark.parametrize("rows", [4, 4096])
def test_layer_norms_become_parts_of_sums(rows, form):
    first, second, after = kernels_of(layer_norms(rows, form))
    for calls in (first, second):
        plain, with_norm = calls  # the only sum of a function is computed twice
        assert len(with_norm.args[1].fields) == len(plain.args[1].fields) + 2  # weight and bias
        assert shapes_of(with_norm) == [([rows, 64], "float32")]
    assert not {"relax.nn.layer_norm", "relax.mean", "relax.sqrt", "relax.subtract"}.intersection(ops_of(after))


@pytest.mark.parametrize("rows", [4, 4096])
def test_kernels_of_layer_norms_compile(rows):
    regions = rh.compile(layer_norms(rows, "op")).metadata.regions
    assert all(any("all_reduce" in kernel for kernel in region.kernels) for region in regions)


def test_rows_that_gpus_cannot_share_keep_their_norm():
    first, _, after = kernels_of(layers(4097))
    assert [shapes_of(call) for call in first] == [[([4097, 64], "float32")]] * 2
    assert ops_of(after).count("relax.rsqrt") == 2


def test_a_long_sum_that_others_read_keeps_its_norm():
    shape = (4096, WIDTH)

    @ir_module(*GPUS)
    def module(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN))
            b = R.nn.rms_norm(a, R.const(SCALE), axes=[-1])
            c = R.matmul(R.concat((a, b), axis=1), R.const(np.concatenate([UP, UP])))
            R.output(c)
        return c

    first, _, after = kernels_of(module)
    assert [shapes_of(call) for call in first][-1] == [([4096, 64], "float32")]
    assert ops_of(after).count("relax.nn.rms_norm") == 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 4), (7, 12), (32, 4096), (96, 2048), (2048, 4096), (24, 16384), (3_000_004,)])
def test_blocks_cover_all_rows_and_fit_the_gpu(shape, ranks):
    plain = AllReduce(shape, ranks)
    kinds = [plain]
    if plain.supports_rows:
        kinds += [AllReduce(shape, ranks, RowNorm(1e-5, "float16")), AllReduce(shape, ranks, None, not plain.is_short)]
    for reduce in kinds:
        assert reduce.row * reduce.lanes <= reduce.count
        assert reduce.threads * (8 if reduce.is_short else 4) >= reduce.row  # registers of a thread
        assert reduce.blocks <= 128  # all are resident on any GPU that NVLink connects
        assert reduce.slot_bytes >= (8 * reduce.count if reduce.is_short else 8 * reduce.count // ranks)
        if reduce.norm is not None or reduce.has_residual:
            assert reduce.row * reduce.lanes == shape[-1]


def test_a_slot_holds_the_first_pass_of_a_lone_sum():
    """A function's only sum is computed twice; the first pass has no norm, so that its parts are no whole rows."""
    shape = (4098, WIDTH)

    @ir_module(*GPUS)
    def module(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN))
            b = R.nn.rms_norm(a, R.const(SCALE), axes=[-1])
            c = R.matmul(b, R.const(UP))
            R.output(c)
        return c

    first, _, after = kernels_of(module)
    assert len(first) == 2
    (slot_bytes,) = {int(call.args[2]) for call in calls_of("relax.call_pure_packed", after)}
    plain, with_norm = AllReduce(shape, 2), AllReduce(shape, 2, RowNorm(1e-5, "float32"))
    assert slot_bytes >= plain.slot_bytes > with_norm.slot_bytes


def test_graphs_of_gpus_are_selected_by_the_same_sizes():
    """The second GPU's work does not depend on the size: but it must not launch while the first one makes a graph."""

    @ir_module(*GPUS)
    def module(x: R.Tensor((4, WIDTH), "float32", "cuda[0:2]"), y: R.Tensor(("n", 8), "float32", "cuda:0")):
        with R.dataflow():
            a = R.nn.softmax(R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN)))
            b = R.matmul(a, R.const(UP))
            z = R.nn.relu(y)
            R.output(b, z)
        return b, z

    regions = rh.compile(module).metadata.regions
    assert [(region.device, region.parameters) for region in regions] == [(0, ("n",)), (1, ("n",))]
