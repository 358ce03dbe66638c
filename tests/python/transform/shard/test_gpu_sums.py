"""Sums of GPUs by kernels: norms and residuals that become parts of them, and the ones that stay."""

from textwrap import dedent

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from modules import calls_of, ir_module, ops_of
from relax_hetero.target.gpu_target import NVLINK_BYTES_PER_SECOND
from relax_hetero.tir.cuda.all_reduce import (
    ALL_REDUCE,
    AllReduce,
    RankReduce,
    RowNorm,
    all_reduce_seconds,
    max_short_bytes,
)
from relax_hetero.transform.ir.kernels import called_prim_func
from relax_hetero.transform.ir.op_names import TRANSFER
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from relax_hetero.transform.pipeline import pipeline_steps
from relax_hetero.transform.record.region_attrs import regions_of
from relax_hetero.transform.shard.exchange_by_nccl import collectives_of
from relax_hetero.transform.shard.partition_by_mesh import partition_by_mesh
from transform.interpreting import run, run_call, tensors_in
from transform.shard.test_partition_by_mesh import RandomGraph

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


def lone_sum(shape):
    """A function with one sum, and its norm."""

    @ir_module(*GPUS)
    def module(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN))
            b = R.nn.rms_norm(a, R.const(SCALE), axes=[-1])
            c = R.matmul(b, R.const(UP))
            R.output(c)
        return c

    return module


def kernels_of(module):
    """Calls of sums by the rank of their GPU, and the module's ops."""
    after = partition_by_mesh(module)
    calls = [call for call in calls_of("relax.call_tir", after) if "all_reduce" in call.args[0].name_hint]
    return calls[0::2], calls[1::2], after


def shapes_of(call):
    types = call.ty.fields if hasattr(call.ty, "fields") else [call.ty]
    return [([int(extent) for extent in ty.shape.values], str(ty.dtype)) for ty in types]


def text_of(expr):
    """A value of the program as text, with ``_`` for constants and numbers."""
    if isinstance(expr, relax.Var):
        return expr.name
    if isinstance(expr, relax.Tuple):
        return ", ".join(map(text_of, expr.fields))
    if isinstance(expr, relax.TupleGetItem):
        return f"{text_of(expr.tuple_value)}[{expr.index}]"
    if not isinstance(expr, relax.Call):
        return "_"
    name, args = op_name(expr).removeprefix("relax."), expr.args
    if name == "call_tir":
        name, args = args[0].name_hint, args[1].fields
    return f"{name}({', '.join(map(text_of, args))})"


# What the first GPU computes after the partition.

SHORT = """
    lv = matmul(x, _)
    lv1 = matmul(lv, _)
    a = add(x, lv1)
    a_sum_and_norm = all_reduce_0_of_2(a, peer_memory, a, _)
    b = a_sum_and_norm[0]
    a_sum = a_sum_and_norm[1]
    lv10 = astype(b)
    lv11 = matmul(lv10, _)
    lv12 = matmul(lv11, _)
    c = add(lv12, a_sum)
    c_sum = all_reduce_0_of_21(c, peer_memory, b)
    lv14 = nn.softmax(c_sum)
    d = matmul(lv14, _)
"""
LONG = """
    lv = matmul(x, _)
    lv1 = matmul(lv, _)
    a_sum_and_norm = all_reduce_0_of_2(lv1, peer_memory, lv1, x, _)
    b = a_sum_and_norm[0]
    a_sum_rows = a_sum_and_norm[1]
    lv10 = astype(b)
    lv11 = matmul(lv10, _)
    lv12 = matmul(lv11, _)
    c_sum = all_reduce_0_of_21(lv12, peer_memory, b, a_sum_rows)
    lv14 = nn.softmax(c_sum)
    d = matmul(lv14, _)
"""
LAYER_NORMS_AND_A_ROW = """
    lv = matmul(x, _)
    lv1 = matmul(lv, _)
    a_sum_and_norm = all_reduce_0_of_2(lv1, peer_memory, lv1, x, _, _)
    b = a_sum_and_norm[0]
    a_sum_rows = a_sum_and_norm[1]
    lv4 = matmul(b, _)
    lv5 = matmul(lv4, _)
    c_sum_and_norm = all_reduce_0_of_21(lv5, peer_memory, b, a_sum_rows, _, _)
    d = c_sum_and_norm[0]
    c_sum_rows = c_sum_and_norm[1]
    lv8 = matmul(d, _)
    e = matmul(lv8, _)
    lv10 = kept_rows(c_sum_rows, last)
    lv11 = take(e, last)
    f = add(lv10, lv11)
    lv13 = all_reduce_0_of_22(f, peer_memory, d, _, _)
    g = matmul(lv13, _)
"""


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
        residual = calls[0].args[1].fields[3]  # of which each GPU adds its rows
        assert residual.same_as(after["main"].params[0]) or op_name(values[residual]) == TRANSFER
    assert "relax.add" not in ops_of(after)


def prefill(rows):
    """Two sums with norms and a residual, then one of a row, as at the end of a prefill."""
    shape = (rows, WIDTH)

    @ir_module(*GPUS)
    def module(x: R.Tensor(shape, "float32", "cuda[0:2]"), last: R.Tensor((1,), "int32", "cuda[0:2]")):
        with R.dataflow():
            a = R.add(x, R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN)))
            b = R.nn.layer_norm(a, R.const(SCALE), R.const(SCALE), axes=[-1])
            c = R.add(a, R.matmul(R.matmul(b, R.const(UP)), R.const(DOWN)))
            d = R.nn.layer_norm(c, R.const(SCALE), R.const(SCALE), axes=[-1])
            e = R.matmul(R.matmul(d, R.const(UP)), R.const(DOWN))
            f = R.add(R.take(c, last, axis=0, mode="clip"), R.take(e, last, axis=0, mode="clip"))
            g = R.matmul(R.nn.layer_norm(f, R.const(SCALE), R.const(SCALE), axes=[-1]), R.const(UP))
            R.output(g)
        return (g,)

    return module


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param(lambda: layers(4), SHORT, id="short"),
        pytest.param(lambda: layers(4096), LONG, id="long"),
        pytest.param(lambda: prefill(4096), LAYER_NORMS_AND_A_ROW, id="row"),
    ],
)
def test_forms(before, expected):
    bindings = walk_bindings(partition_by_mesh(before())["main"].body)
    lines = [f"{binding.var.name} = {text_of(binding.value)}" for binding in bindings]
    exchanges = ("call_pure_packed", "to_vdevice", "concat", "@")
    assert [line for line in lines if not any(word in line for word in exchanges)] == dedent(expected).split("\n")[1:-1]


@pytest.mark.parametrize("last", [-1, 0, 1, 2047, 2048, 4095, 4096])
def test_the_gpu_that_keeps_a_row_of_a_long_sum_adds_it(last):
    before = prefill(4096)
    first, _, after = kernels_of(before)
    kept = [([4096, 64], "float32"), ([2048, 64], "float32")]
    assert [shapes_of(call) for call in first] == [kept, kept, [([1, 64], "float32")]]
    values = {binding.var: binding.value for binding in walk_bindings(after["main"].body)}
    assert [op_name(values[call.args[1].fields[0]]) for call in first] == ["relax.matmul", "relax.matmul", "relax.add"]
    x, index = np.random.default_rng(3).standard_normal((4096, WIDTH)).astype("float32"), np.array([last], "int32")
    for actual, expected in zip(run_sums(after, x, index), run(before, x, index), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("result", ["y", "t"])
def test_values_after_a_long_sum_are_no_operands_of_it(result):
    """The second GPU has y after the sum, and row t is taken before the sum."""
    shape = (4096, WIDTH)

    @ir_module(*GPUS)
    def before(x: R.Tensor(shape, "float32", "cuda[0:2]"), y: R.Tensor(shape, "float32"), at: R.Tensor((1,), "int32")):
        with R.dataflow():
            a = R.add(y, R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN)))
            t = R.matmul(R.nn.relu(R.take(a, at, axis=0, mode="clip")), R.const(UP))
            b = R.nn.layer_norm(a, R.const(SCALE), R.const(SCALE), axes=[-1])
            c = R.matmul(R.multiply(b, y), R.const(UP))
            d = R.add(c, t if result == "t" else c)
            R.output(d)
        return (d,)

    first, _, after = kernels_of(before)
    assert [shapes_of(call) for call in first][-1] == [([4096, 64], "float32")]
    inputs = [*np.random.default_rng(3).standard_normal((2, *shape)).astype("float32"), np.array([7], "int32")]
    for actual, expected in zip(run_sums(after, *inputs), run(before, *inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_a_row_of_a_short_sum_is_taken_before_the_sum():
    first, _, after = kernels_of(prefill(4))
    assert [shapes_of(call)[-1] for call in first] == [([4, 64], "float32")] * 2 + [([1, 64], "float32")]
    assert "kept_rows" not in {gv.name_hint for gv in after.functions}


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
        assert reduce.row * 4 <= reduce.count
        assert reduce.threads * 4 >= reduce.row  # registers of a thread
        assert reduce.blocks <= 128  # all are resident on any GPU that NVLink connects
        assert reduce.slot_bytes >= 4 * reduce.count // (1 if reduce.is_short else ranks)
        if reduce.norm is not None or reduce.has_residual:
            assert reduce.row * 4 == shape[-1]


def test_the_limit_of_short_sums_is_where_both_kinds_take_the_same_time():
    """As long as memory allows; rows that GPUs cannot share equally are not shared up to there."""
    assert [max_short_bytes(ranks) >> 10 for ranks in (2, 3, 4, 6, 8)] == [512, 512, 512, 404, 256]
    seconds = max_short_bytes(8) / NVLINK_BYTES_PER_SECOND
    assert all_reduce_seconds(8, seconds, True) == pytest.approx(all_reduce_seconds(8, seconds, False), rel=1e-5)
    kinds = {(32, 2): True, (32, 4): True, (16, 8): True, (24, 8): False, (23, 8): True, (33, 8): False}
    assert {(rows, ranks): AllReduce((rows, 4096), ranks).is_short for rows, ranks in kinds} == kinds


def test_a_slot_holds_the_first_pass_of_a_lone_sum():
    """A function's only sum is computed twice; the first pass has no norm, so that its parts are no whole rows."""
    shape = (4098, WIDTH)
    first, _, after = kernels_of(lone_sum(shape))
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [12, 79, 118])  # their transfers and sums could be in several orders
def test_gpus_have_the_same_transfers_and_sums_in_the_same_order(seed):
    """A transfer waits for all work of both GPUs, and later work of both for it, as a sum does."""
    module = RandomGraph(np.random.default_rng(seed), (2,), 12, GPUS[0]).module()
    for step in pipeline_steps():
        module = step.run(module)
        if step.name == "FormCommandBuffers":
            break
    regions, order = {region.name: region for region in regions_of(module)}, {0: [], 1: []}
    for binding in walk_bindings(module["main"].body):
        value = binding.value
        if op_name(value) == TRANSFER:
            for names in order.values():
                names.append(binding.var.name)
        elif op_name(value) == "relax.call_tir":
            region = regions.get(value.args[0].name_hint)
            # A call makes all graphs before it launches one: a sum outside of them would wait for another GPU's.
            assert region is not None or not value.args[0].name_hint.startswith("all_reduce")
            for name in [] if region is None else [each.kernel for each in region.commands]:
                if name.startswith("all_reduce"):
                    order[int(name.split("_")[2])].append(f"sum {name.split('_of_')[1]}")
    assert order[0] == order[1] and 1 < sum(name.startswith("sum") for name in order[0]) < len(order[0])


def random_layers(pick, mesh_shape, rows):
    """Three layers, most of them with a residual and a norm, some with results of their own, such as a row."""
    graph = RandomGraph(pick, mesh_shape, 0, GPUS[0])
    graph.params, op, emit = [relax.Var("x", relax.TensorType([rows, WIDTH], "float32"))], relax.op, graph.emit
    (x,), results = graph.params, []
    scale, shift = relax.const(SCALE), graph.weight(WIDTH)

    def norm():
        form, centered = pick.integers(3), x
        if form == 0:
            return emit(op.nn.layer_norm(x, scale, shift, axes=[-1], epsilon=1e-5))
        if form == 1:
            centered = emit(op.subtract(x, emit(op.mean(x, [-1], keepdims=True))))
        mean = emit(op.mean(emit(op.multiply(centered, centered)), [-1], keepdims=True))
        root = emit(op.rsqrt(emit(op.add(mean, relax.const(1e-5, "float32")))))
        y = emit(op.multiply(emit(op.multiply(centered, root)), scale))
        return emit(op.add(y, shift)) if form == 1 else y

    for _ in range(3):
        h = emit(op.nn.relu(emit(op.matmul(norm(), graph.weight(WIDTH, 12)))))
        y = emit(op.matmul(h, graph.weight(12, WIDTH)))
        x = emit(op.add(y, x)) if pick.random() < 0.8 else y
        if pick.random() < 0.3:
            kind = pick.integers(3)
            row = relax.const(pick.integers(rows, size=1).astype("int32"))
            results.append(x if kind == 0 else emit(op.negative(x) if kind == 1 else op.take(x, row, 0, "clip")))
    graph.values = [*results, emit(op.matmul(norm(), graph.weight(WIDTH, 12)))][-3:]
    return graph.module()


def run_sums(module, *inputs):
    """Results of a function with kernels that sum, in numpy."""
    relax.analysis.well_formed(module)  # values are made before they are read, of which `evaluate` knows nothing
    func = module["main"]
    values, definitions, sums = dict(zip(func.params, inputs, strict=True)), {}, {}
    group = []
    for binding in func.body.blocks[0].bindings:
        definitions[binding.var] = binding.value
        kernel = called_prim_func(module, binding.value)
        if kernel is not None and ALL_REDUCE in (module[kernel].attrs or ()):
            # Those of a sum follow each other, the first GPU's first.
            own = RankReduce.from_json(module[kernel].attrs[ALL_REDUCE])
            group = [] if own.rank == 0 else group
            group.append((binding, own))
            sums[binding.var] = group

    def evaluate(var):
        if isinstance(var, tvm.ir.GenericConst):
            return var.value.numpy()
        if var not in values:
            value = definitions[var]
            if var in sums:
                values.update(added(sums[var]))
            elif isinstance(value, relax.TupleGetItem):
                values[var] = evaluate(value.tuple_value)[value.index]
            elif (kernel := called_prim_func(module, value)) is not None:
                arrays = [tvm.runtime.tensor(evaluate(field)) for field in value.args[1].fields]
                result = tvm.runtime.empty([int(extent) for extent in value.ty.shape.values], str(value.ty.dtype))
                tvm.compile(module[kernel], "llvm")(*arrays, result)
                values[var] = result.numpy()
            else:
                values[var] = run_call(value, list(map(evaluate, tensors_in(value.args))), {})
        return values[var]

    def added(calls):
        parts = [evaluate(call.value.args[1].fields[0]) for call, _ in calls]
        total = np.sum(parts, 0, "float64")
        share = len(total) // len(calls)
        for number, (call, own) in enumerate(calls):
            assert own.rank == number and parts[number].shape == own.reduce.shape
            if own.reduce.has_residual:
                residual = evaluate(call.value.args[1].fields[3])
                begin = number * share if own.reduce.is_residual_whole else 0
                total[number * share :][:share] += residual[begin : begin + share]
        for number, (call, own) in enumerate(calls):
            weights = [evaluate(field) for field in call.value.args[1].fields[3 + own.reduce.has_residual :]]
            result = total - total.mean(1, keepdims=True) if len(weights) > 1 else total
            if weights:
                root = np.sqrt((result**2).mean(1, keepdims=True) + own.reduce.norm.eps)
                result = result / root * weights[0] + sum(weights[1:])
            rows = total if own.reduce.is_short else total[number * share :][:share]
            results = [array.astype("float32") for array in (result, rows)]
            yield call.var, results if own.keeps_sum else results[0]

    return list(map(evaluate, func.body.body.fields))


@pytest.mark.parametrize("rows", [12, 3072])
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_sums_with_norms_and_residuals_give_the_same_numbers(mesh_shape, rows):
    joined = set()
    for seed in range(6):
        pick = np.random.default_rng(seed)
        before = random_layers(pick, mesh_shape, rows)
        after, x = partition_by_mesh(before), pick.standard_normal((rows, WIDTH)).astype("float32")
        for actual, expected in zip(run_sums(after, x), run(before, x), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
        joined |= {name for each in collectives_of(after) for name in each.joined}
    keeps_rows = rows > 12 and len(mesh_shape) == 1  # parts of rows are the residual of a sum of the same GPUs
    assert joined == ({"norm", "residual"} if keeps_rows else {"norm"})
