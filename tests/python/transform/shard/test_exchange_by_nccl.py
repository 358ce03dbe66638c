"""ExchangeByNccl: kernels before and after NCCL's sums, where NCCL sums, and what explanations say."""

from itertools import pairwise

import numpy as np
import pytest
import tvm
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm_ffi import structural_walk

import relax_hetero as rh
from modules import calls_of, check_pass, ir_module, ops_of
from relax_hetero.artifact.commands import GRAPH
from relax_hetero.artifact.metadata import Metadata
from relax_hetero.artifact.nccl_layout import NCCL_COLLECTIVE, NCCL_MEMORY, from_numbers, transfers
from relax_hetero.artifact.peer_layout import PEER_MEMORY
from relax_hetero.tir.cuda.all_reduce import AllReduce, RankReduce, RowNorm, all_reduce_kernel
from relax_hetero.tir.cuda.nccl_kernels import (
    Exchange,
    Transfer,
    finish_kernel,
    receive_kernel,
    send_kernel,
    stage_kernel,
)
from relax_hetero.transform.ir.kernels import opaque_kernel
from relax_hetero.transform.ir.rewriting import walk_bindings
from relax_hetero.transform.pipeline import pipeline_steps
from relax_hetero.transform.record import command_regions
from relax_hetero.transform.record.region_attrs import regions_of
from relax_hetero.transform.shard import exchange_by_nccl as subject
from relax_hetero.transform.shard.exchange_by_nccl import collectives_of, exchange_by_nccl
from relax_hetero.transform.shard.exchanges import Exchanges
from relax_hetero.transform.shard.partition_by_mesh import partition_by_mesh
from transform.shard.test_gpu_sums import DOWN, GPUS, SCALE, UP, WIDTH, layers, lone_sum, shapes_of
from transform.shard.test_partition_by_mesh import RandomGraph

SLOT_BYTES = 1 << 22
pytestmark = pytest.mark.usefixtures("free_exchanges")


@pytest.fixture(scope="module", params=[4, 4096], ids=["short", "long"])
def both(request):
    """A module with kernels, and with NCCL."""
    before = partition_by_mesh(layers(request.param), by_cost=False)
    return before, exchange_by_nccl(before)


@pytest.fixture
def reachable(monkeypatch):
    """Let `auto` see a machine whose GPUs reach each other's memory, or do not."""

    def choose(reaches):
        subject.unreachable.cache_clear()
        monkeypatch.setattr(subject, "can_access_peer", reaches if callable(reaches) else lambda gpu, peer: reaches)

    yield choose
    subject.unreachable.cache_clear()


def kernels_of(module, name):
    """Calls of kernels by the rank of their GPU."""
    calls = [call for call in calls_of("relax.call_tir", module) if name in call.args[0].name_hint]
    return calls[0::2], calls[1::2]


def _tensor(gpu, shape=(4, WIDTH), dtype="float32"):
    return R.Tensor(shape, dtype, f"cuda:{gpu}")


def _peer_memory(gpu, other=1):
    return R.call_pure_packed(PEER_MEMORY, gpu, SLOT_BYTES, 0, other, ty_args=_tensor(gpu, (2,), "int64"))


def _nccl_memory(gpu, *collectives):
    return R.call_pure_packed(NCCL_MEMORY, gpu, 2, 0, 1, *collectives, ty_args=_tensor(gpu, (2,), "int64"))


def _peer_kernels(name, reduce, after, keeps_sum):
    """Kernels of a sum of two GPUs, which access each other's memory, by their names."""
    ranks = enumerate(keeps_sum)
    kernels = [all_reduce_kernel(reduce, rank, 0, SLOT_BYTES, after, keeps) for rank, keeps in ranks]
    return {f"{name}_{rank}": opaque_kernel(kernel) for rank, kernel in enumerate(kernels)}


def _nccl_kernels(reduce, after, keeps_sum, suffix=""):
    """Kernels around a sum of NCCL, by the names that the pass gives them."""
    kernels = {}
    for rank, keeps in enumerate(keeps_sum):
        own = RankReduce(reduce, rank, keeps, why='allreduce_strategy="nccl"')
        kernels[f"stage_{rank}_of_2{suffix}"] = opaque_kernel(stage_kernel(own, after))
        kernels[f"all_reduce_nccl_{rank}_of_2{suffix}"] = opaque_kernel(finish_kernel(own, 0, (0, 1)))
    return kernels


def test_short_sums_before_and_after():
    """The first GPU also keeps the sum beside the norm's result; the second sum follows the norms."""
    floats, halves, normal = ((4, WIDTH), "float32"), ((4, WIDTH), "float16"), RowNorm(1e-5, "float16")
    first, second = AllReduce((4, WIDTH), 2, normal), AllReduce((4, WIDTH), 2)
    by_peers = _peer_kernels("first", first, floats, (True, False))
    by_peers |= _peer_kernels("then", second, halves, (False, False))
    by_nccl = _nccl_kernels(first, floats, (True, False))
    by_nccl |= _nccl_kernels(second, halves, (False, False), "_1")

    @ir_module(*GPUS, kernels=by_peers)
    def before(x0: _tensor(0), x1: _tensor(1)):
        with R.dataflow():
            bases0 = _peer_memory(0)
            both = R.call_tir(first_0, (x0, bases0, x0, R.const(SCALE)), [_tensor(0, dtype="float16"), _tensor(0)])
            norm0 = both[0]
            total = both[1]
            bases1 = _peer_memory(1)
            norm1 = R.call_tir(first_1, (x1, bases1, x1, R.const(SCALE)), _tensor(1, dtype="float16"))
            y0 = R.add(total, R.astype(norm0, "float32"))
            y1 = R.astype(norm1, "float32")
            z0 = R.call_tir(then_0, (y0, bases0, norm0), _tensor(0))
            z1 = R.call_tir(then_1, (y1, bases1, norm1), _tensor(1))
            R.output(z0, z1)
        return z0, z1

    @ir_module(*GPUS, kernels=by_nccl)
    def expected(x0: _tensor(0), x1: _tensor(1)):
        with R.dataflow():
            bases0 = _nccl_memory(0, 1, 4 * WIDTH)  # one collective of one number: both sums are as long
            bases1 = _nccl_memory(1, 1, 4 * WIDTH)
            token0 = R.call_tir(stage_0_of_2, (x0, bases0, x0), _tensor(0, (1,)))
            kinds = [_tensor(0, dtype="float16"), _tensor(0)]
            both = R.call_tir(all_reduce_nccl_0_of_2, (bases0, token0, R.const(SCALE)), kinds)
            norm0 = both[0]
            total = both[1]
            token1 = R.call_tir(stage_1_of_2, (x1, bases1, x1), _tensor(1, (1,)))
            norm1 = R.call_tir(all_reduce_nccl_1_of_2, (bases1, token1, R.const(SCALE)), _tensor(1, dtype="float16"))
            y0 = R.add(total, R.astype(norm0, "float32"))
            y1 = R.astype(norm1, "float32")
            token2 = R.call_tir(stage_0_of_2_1, (y0, bases0, norm0), _tensor(0, (1,)))
            z0 = R.call_tir(all_reduce_nccl_0_of_2_1, (bases0, token2), _tensor(0))
            token3 = R.call_tir(stage_1_of_2_1, (y1, bases1, norm1), _tensor(1, (1,)))
            z1 = R.call_tir(all_reduce_nccl_1_of_2_1, (bases1, token3), _tensor(1))
            R.output(z0, z1)
        return z0, z1

    check_pass(exchange_by_nccl, before, expected)


def test_long_sums_before_and_after():
    """Each GPU keeps its rows of the sum, which the kernel before the next sum adds to its operand."""
    shape, rows, eps = (4096, WIDTH), (2048, WIDTH), 1e-5
    floats, halves = (shape, "float32"), (shape, "float16")
    first, second = AllReduce(shape, 2, RowNorm(eps, "float16", is_centered=True)), AllReduce(shape, 2, None, True)
    by_peers = _peer_kernels("first", first, floats, (True, True))
    by_peers |= _peer_kernels("then", second, halves, (False, False))
    by_nccl = _nccl_kernels(first, floats, (True, True))
    by_nccl |= _nccl_kernels(second, halves, (False, False), "_1")

    @ir_module(*GPUS, kernels=by_peers)
    def before(x0: _tensor(0, shape), x1: _tensor(1, shape)):
        with R.dataflow():
            bases0 = _peer_memory(0)
            kinds0 = [_tensor(0, shape, "float16"), _tensor(0, rows)]
            both0 = R.call_tir(first_0, (x0, bases0, x0, R.const(SCALE), R.const(UP[:, 0])), kinds0)
            norm0 = both0[0]
            rows0 = both0[1]
            bases1 = _peer_memory(1)
            kinds1 = [_tensor(1, shape, "float16"), _tensor(1, rows)]
            both1 = R.call_tir(first_1, (x1, bases1, x1, R.const(SCALE), R.const(UP[:, 0])), kinds1)
            norm1 = both1[0]
            rows1 = both1[1]
            y0 = R.astype(norm0, "float32")
            y1 = R.astype(norm1, "float32")
            z0 = R.call_tir(then_0, (y0, bases0, norm0, rows0), _tensor(0, shape))
            z1 = R.call_tir(then_1, (y1, bases1, norm1, rows1), _tensor(1, shape))
            R.output(z0, z1)
        return z0, z1

    @ir_module(*GPUS, kernels=by_nccl)
    def expected(x0: _tensor(0, shape), x1: _tensor(1, shape)):
        with R.dataflow():
            bases0 = _nccl_memory(0, 1, 4096 * WIDTH)
            bases1 = _nccl_memory(1, 1, 4096 * WIDTH)
            token0 = R.call_tir(stage_0_of_2, (x0, bases0, x0), _tensor(0, (1,)))
            kinds0 = [_tensor(0, shape, "float16"), _tensor(0, rows)]
            both0 = R.call_tir(all_reduce_nccl_0_of_2, (bases0, token0, R.const(SCALE), R.const(UP[:, 0])), kinds0)
            norm0 = both0[0]
            rows0 = both0[1]
            token1 = R.call_tir(stage_1_of_2, (x1, bases1, x1), _tensor(1, (1,)))
            kinds1 = [_tensor(1, shape, "float16"), _tensor(1, rows)]
            both1 = R.call_tir(all_reduce_nccl_1_of_2, (bases1, token1, R.const(SCALE), R.const(UP[:, 0])), kinds1)
            norm1 = both1[0]
            rows1 = both1[1]
            y0 = R.astype(norm0, "float32")
            y1 = R.astype(norm1, "float32")
            token2 = R.call_tir(stage_0_of_2_1, (y0, bases0, norm0, rows0), _tensor(0, (1,)))
            z0 = R.call_tir(all_reduce_nccl_0_of_2_1, (bases0, token2), _tensor(0, shape))
            token3 = R.call_tir(stage_1_of_2_1, (y1, bases1, norm1, rows1), _tensor(1, (1,)))
            z1 = R.call_tir(all_reduce_nccl_1_of_2_1, (bases1, token3), _tensor(1, shape))
            R.output(z0, z1)
        return z0, z1

    check_pass(exchange_by_nccl, before, expected)


def test_a_scatter_and_a_gather_before_and_after():
    """After a sum, each GPU gives the other one its part of some rows, and later the result of its own."""
    rows, half = (4, WIDTH), (2, WIDTH)
    reduce, floats = AllReduce(rows, 2), (rows, "float32")
    by_nccl = _nccl_kernels(reduce, floats, (False, False))
    for number, dtype, after, suffix in ((1, "float32", rows, ""), (2, "float16", half, "_1")):
        exchange = Exchange(2, (Transfer(1, 0, half, dtype), Transfer(0, 1, half, dtype)))
        for rank in range(2):
            send = send_kernel(exchange, rank, (after, "float32"))
            by_nccl[f"send_{rank}_of_2{suffix}"] = opaque_kernel(send)
            by_nccl[f"receive_{rank}_of_2{suffix}"] = opaque_kernel(receive_kernel(exchange, rank, number, (0, 1)))

    @ir_module(*GPUS, kernels=_peer_kernels("first", reduce, floats, (False, False)))
    def before(x0: _tensor(0), x1: _tensor(1)):
        with R.dataflow():
            bases0 = _peer_memory(0)
            a0 = R.call_tir(first_0, (x0, bases0, x0), _tensor(0))
            bases1 = _peer_memory(1)
            a1 = R.call_tir(first_1, (x1, bases1, x1), _tensor(1))
            lower0 = R.strided_slice(a0, [0], [0], [2])
            lower1 = R.strided_slice(a1, [0], [0], [2])
            upper0 = R.strided_slice(a0, [0], [2], [4])
            upper1 = R.strided_slice(a1, [0], [2], [4])
            sent0: _tensor(0, half) = R.to_vdevice(lower1, "cuda:0")
            sent1: _tensor(1, half) = R.to_vdevice(upper0, "cuda:1")
            c0 = R.astype(R.add(lower0, sent0), "float16")
            c1 = R.astype(R.add(sent1, upper1), "float16")
            other0: _tensor(0, half, "float16") = R.to_vdevice(c1, "cuda:0")
            d0 = R.concat((c0, other0), axis=0)
            other1: _tensor(1, half, "float16") = R.to_vdevice(c0, "cuda:1")
            d1 = R.concat((other1, c1), axis=0)
            R.output(d0, d1)
        return d0, d1

    exchanges = 6, 1, 0, 8 * WIDTH, 0, 1, 8 * WIDTH, 6, 1, 0, 4 * WIDTH, 0, 1, 4 * WIDTH

    @ir_module(*GPUS, kernels=by_nccl)
    def expected(x0: _tensor(0), x1: _tensor(1)):
        with R.dataflow():
            bases0 = _nccl_memory(0, 1, 4 * WIDTH, *exchanges)
            bases1 = _nccl_memory(1, 1, 4 * WIDTH, *exchanges)
            token0 = R.call_tir(stage_0_of_2, (x0, bases0, x0), _tensor(0, (1,)))
            a0 = R.call_tir(all_reduce_nccl_0_of_2, (bases0, token0), _tensor(0))
            token1 = R.call_tir(stage_1_of_2, (x1, bases1, x1), _tensor(1, (1,)))
            a1 = R.call_tir(all_reduce_nccl_1_of_2, (bases1, token1), _tensor(1))
            lower0 = R.strided_slice(a0, [0], [0], [2])
            lower1 = R.strided_slice(a1, [0], [0], [2])
            upper0 = R.strided_slice(a0, [0], [2], [4])
            upper1 = R.strided_slice(a1, [0], [2], [4])
            gives0 = R.call_tir(send_0_of_2, (upper0, bases0, a0), _tensor(0, (1,)))
            gives1 = R.call_tir(send_1_of_2, (lower1, bases1, a1), _tensor(1, (1,)))
            sent0 = R.call_tir(receive_0_of_2, (bases0, gives0), _tensor(0, half))
            sent1 = R.call_tir(receive_1_of_2, (bases1, gives1), _tensor(1, half))
            c0 = R.astype(R.add(lower0, sent0), "float16")
            c1 = R.astype(R.add(sent1, upper1), "float16")
            shows0 = R.call_tir(send_0_of_2_1, (c0, bases0, sent0), _tensor(0, (1,)))
            shows1 = R.call_tir(send_1_of_2_1, (c1, bases1, sent1), _tensor(1, (1,)))
            other0 = R.call_tir(receive_0_of_2_1, (bases0, shows0), _tensor(0, half, "float16"))
            other1 = R.call_tir(receive_1_of_2_1, (bases1, shows1), _tensor(1, half, "float16"))
            d0 = R.concat((c0, other0), axis=0)
            d1 = R.concat((other1, c1), axis=0)
            R.output(d0, d1)
        return d0, d1

    check_pass(exchange_by_nccl, before, expected)


def test_a_lone_sum_is_computed_once():
    before = partition_by_mesh(lone_sum((4, WIDTH)))
    assert [len(calls) for calls in kernels_of(before, "all_reduce")] == [2, 2]
    first, _ = kernels_of(exchange_by_nccl(before), "all_reduce")
    assert [shapes_of(call) for call in first] == [[([4, WIDTH], "float32")]]
    first, second = kernels_of(exchange_by_nccl(before), "stage")
    assert len(first) == len(second) == 1


@pytest.mark.parametrize("reaches", [True, None])  # None: this machine has no GPUs
def test_gpus_that_reach_each_other_keep_kernels(both, reachable, reaches):
    before, after = both
    reachable(reaches)
    assert exchange_by_nccl(before, "auto").same_as(before)
    assert exchange_by_nccl(before, "custom").same_as(before)
    assert exchange_by_nccl(after, "auto").same_as(after)
    reachable(False)
    assert exchange_by_nccl(before, "custom").same_as(before)


def test_gpus_that_do_not_reach_each_other_use_nccl(both, reachable):
    reachable(False)
    after = exchange_by_nccl(both[0], "auto")
    assert PEER_MEMORY not in [str(call.args[0].global_symbol) for call in calls_of("relax.call_pure_packed", after)]
    assert {each.why for each in collectives_of(after)} == {"GPU 0 cannot access the memory of GPU 1"}


def test_explanations_list_sums(both, capsys):
    before, after = both
    is_short = int(before["main"].params[0].ty.shape.values[0]) == 4
    assert [each.algorithm for each in collectives_of(before)] == [("one-shot" if is_short else "two-shot")] * 2
    nccl = rh.compile(after)
    first, second = nccl.metadata.collectives
    residual = () if is_short else ("residual",)
    assert (first.variable, first.function, first.devices) == ("a_sum", "main", (0, 1))
    assert (second.algorithm, first.joined, second.joined) == ("NCCL", ("norm", *residual), residual)
    assert first.bytes == (1 << 10 if is_short else 1 << 20)
    assert Metadata.from_json(nccl.metadata.to_json()).collectives == nccl.metadata.collectives
    nccl.explain()
    nccl.explain("collectives")
    printed = capsys.readouterr().out
    assert 'Between GPUs: 2 all-reduces by NCCL (allreduce_strategy="nccl").' in printed
    assert "cuda:0, cuda:1" in printed


def launched(module):
    """The module after the pipeline, and by rank the numbers of NCCL's collectives and kernels, in order."""
    for step in pipeline_steps():
        module = step.run(module)
    order = {0: [], 1: []}
    for name in buffers_of(module):
        calls = order[next(region.device for region in regions_of(module) if region.name == name)]
        structural_walk(module[f"{name}_record"].body, (tvm.ir.Call, calls.append))
    return module, {rank: [name_of(call) for call in calls] for rank, calls in order.items()}


def buffers_of(module):
    """Names of the command buffers that ``main`` calls, in order."""
    values = [binding.value for binding in walk_bindings(module["main"].body)]
    names = [value.op.name_hint for value in values if isinstance(getattr(value, "op", None), tvm.ir.GlobalVar)]
    return [name for name in names if name.startswith("main_commands")]


def name_of(call):
    """Name of a kernel, or the number of a collective; empty for other calls."""
    if isinstance(call.op, tvm.ir.GlobalVar):
        return call.op.name_hint
    is_collective = call.args and str(getattr(call.args[0], "value", "")) == NCCL_COLLECTIVE
    return int(call.args[1]) if is_collective else ""


def test_graphs_have_nccls_sums_before_the_kernels_that_finish_them(both):
    module, order = launched(both[1])
    for names in order.values():
        kernels = [each for each in names if isinstance(each, int) or each.startswith(("stage", "all_reduce"))]
        assert [each if isinstance(each, int) else each.split("_")[0] for each in kernels] == ["stage", 0, "all"] * 2
        for before, after in pairwise(kernels):
            if isinstance(before, int):  # the kernel waits for all of NCCL's
                attributes = module[after].attrs.get("tirx.kernel_launch_params", ())
                assert "tirx.use_programtic_dependent_launch" not in list(map(str, attributes))


@pytest.fixture
def _copies(monkeypatch):
    """Let small values be gathered as large ones are."""
    monkeypatch.setattr(Exchanges, "_sums_gather", lambda self, group: False)


@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize(
    "seed", [12, 43, 46, 58, 66, 79, 81, 93]
)  # those among the first hundred that have exchanges and sums
def test_gpus_have_the_same_collectives_in_the_same_order(seed):
    before = partition_by_mesh(RandomGraph(np.random.default_rng(seed), (2,), 12, GPUS[0]).module())
    after = exchange_by_nccl(before)
    specs = collectives_of(after)
    assert {spec.op for spec in specs} == {"all-reduce", "exchange"}
    _, order = launched(after)
    numbers = [[each for each in names if isinstance(each, int)] for names in order.values()]
    assert numbers[0] == numbers[1] and len(numbers[0]) == len(specs)
    for names in order.values():
        receive = {str(each).partition("_table")[0] for each in names if str(each).startswith("receive")}
        assert len(receive) == sum(spec.op == "exchange" for spec in specs)


@pytest.mark.usefixtures("_copies")
def test_scatters_all_to_alls_and_gathers_are_one_exchange_each():
    @ir_module(*GPUS)
    def module(x: R.Tensor((4, WIDTH), "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.nn.softmax(R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN)))
            b = R.hetero.shard(R.matmul(R.nn.relu(R.matmul(a, R.const(UP))), R.const(DOWN)), "S[0]")
            c = R.hetero.shard(R.nn.relu(b), "S[1]")
            d = R.matmul(R.hetero.shard(R.nn.relu(c), "R"), R.const(UP))
            R.output(d)
        return d

    before = partition_by_mesh(module)
    after = exchange_by_nccl(before)
    # The argument and the result, which one GPU takes, stay copies.
    assert [ops_of(each).count("relax.to_vdevice") for each in (before, after)] == [8, 2]
    exchanges = [spec for spec in collectives_of(after) if spec.op == "exchange"]
    assert [spec.bytes // (4 * WIDTH) for spec in exchanges] == [4, 2, 4]
    (descriptions,) = {tuple(map(int, call.args[2:])) for call in calls_of("relax.call_pure_packed", after)}
    sums, *crossing = from_numbers(descriptions[3:])
    assert sums == (4 * WIDTH,) and [sorted(transfers(each)) for each in crossing] == [
        [(0, 1, 4 * rows * WIDTH), (1, 0, 4 * rows * WIDTH)] for rows in (2, 1)
    ]


def test_other_transfers_stay_copies():
    """Symbolic and empty shapes, constants, and tensors that one GPU only sends."""

    @ir_module(*GPUS, kernels=_peer_kernels("first", AllReduce((4, WIDTH), 2), ((4, WIDTH), "float32"), (False, False)))
    def before(x0: _tensor(0), x1: _tensor(1), y0: _tensor(0, ("n",)), y1: _tensor(1, ("n",))):
        n = T.int64()
        with R.dataflow():
            bases0 = _peer_memory(0)
            a0 = R.call_tir(first_0, (x0, bases0, x0), _tensor(0))
            bases1 = _peer_memory(1)
            a1 = R.call_tir(first_1, (x1, bases1, x1), _tensor(1))
            b1: _tensor(1) = R.to_vdevice(a0, "cuda:1")
            sizes0: _tensor(0, (n,)) = R.to_vdevice(y1, "cuda:0")
            sizes1: _tensor(1, (n,)) = R.to_vdevice(y0, "cuda:1")
            empty0 = R.strided_slice(a0, [0], [0], [0])
            empty1 = R.strided_slice(a1, [0], [0], [0])
            none0: _tensor(0, (0, WIDTH)) = R.to_vdevice(empty1, "cuda:0")
            none1: _tensor(1, (0, WIDTH)) = R.to_vdevice(empty0, "cuda:1")
            scale: _tensor(0, (WIDTH,)) = R.to_vdevice(R.const(SCALE), "cuda:0")
            R.output(b1, sizes0, sizes1, none0, none1, scale, a1)
        return b1, sizes0, sizes1, none0, none1, scale, a1

    after = exchange_by_nccl(before)
    assert ops_of(after).count("relax.to_vdevice") == ops_of(before).count("relax.to_vdevice") == 6
    assert {spec.op for spec in collectives_of(after)} == {"all-reduce"}


def test_copies_stay_where_some_sums_do(reachable):
    """Where only some GPUs reach each other, sums keep their order, and NCCL adds those of the others."""
    reachable(lambda gpu, peer: {gpu, peer} != {0, 2})
    floats, reduce = ((4, WIDTH), "float32"), AllReduce((4, WIDTH), 2)
    both = _peer_kernels("near", reduce, floats, (False, False)) | _peer_kernels("far", reduce, floats, (False, False))

    @ir_module(*GPUS, (GPUS[0], 2), kernels=both)
    def before(x0: _tensor(0), x1: _tensor(1), x2: _tensor(2)):
        with R.dataflow():
            bases0 = _peer_memory(0)
            a0 = R.call_tir(near_0, (x0, bases0, x0), _tensor(0))
            bases1 = _peer_memory(1)
            a1 = R.call_tir(near_1, (x1, bases1, x1), _tensor(1))
            far0 = _peer_memory(0, 2)
            b0 = R.call_tir(far_0, (a0, far0, a0), _tensor(0))
            far2 = _peer_memory(2, 2)
            b2 = R.call_tir(far_1, (x2, far2, x2), _tensor(2))
            c1: _tensor(1) = R.to_vdevice(b0, "cuda:1")
            c0: _tensor(0) = R.to_vdevice(a1, "cuda:0")
            R.output(c0, c1, b2)
        return c0, c1, b2

    after = exchange_by_nccl(before, "auto")
    assert ops_of(after).count("relax.to_vdevice") == 2
    near, far = collectives_of(after)
    assert (near.devices, near.algorithm, far.devices, far.algorithm) == ((0, 1), "one-shot", (0, 2), "NCCL")
    names = [call.args[0].name_hint for call in calls_of("relax.call_tir", after)]
    of_nccl = [f"{kernel}_{rank}_of_2" for rank in (0, 1) for kernel in ("stage", "all_reduce_nccl")]
    assert names == ["near_0", "near_1", *of_nccl]


def test_sums_outside_of_graphs_are_refused(both):
    with pytest.raises(rh.BuildError, match="'main' has a collective of NCCL outside of a CUDA graph"):
        rh.compile(both[1], command_buffers=False)
    with pytest.raises(rh.BuildError, match="'main_commands' has a collective of NCCL outside"):
        rh.get_pipeline()(both[1])


def test_the_last_kernel_of_a_sum_gets_a_graph_of_its_own(both, monkeypatch):
    monkeypatch.setattr(command_regions, "MAX_CALLS", 1)
    module, order = launched(both[1])
    assert all(region.runs == GRAPH for region in regions_of(module))
    alone = [[command.kernel for command in region.commands] for region in regions_of(module)]
    assert sorted(alone) == [[f"all_reduce_nccl_{rank}_of_2{suffix}"] for rank in (0, 1) for suffix in ("", "_1")]
    assert [each for each in order[1] if isinstance(each, int)] == [0, 0]


def test_kernels_with_targets_are_refused(both):
    formed = both[0]
    for step in pipeline_steps():
        formed = step.run(formed)
        if step.name == "FormDispatches":
            break
    for module in (formed, rh.transform.LowerToVM()(formed)):
        assert exchange_by_nccl(module, "auto").same_as(module)
        with pytest.raises(rh.BuildError, match="expected a module before FormDispatches"):
            exchange_by_nccl(module)


@pytest.mark.parametrize("call", [exchange_by_nccl, lambda mod, name: rh.compile(mod, allreduce_strategy=name)])
def test_unknown_strategies(both, call):
    with pytest.raises(rh.BuildError, match="'ring', expected one of 'auto', 'custom', 'nccl'"):
        call(both[0], "ring")


def test_a_module_without_meshes_is_left_alone():
    @ir_module("llvm")
    def module(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.nn.relu(x)
            R.output(y)
        return y

    assert exchange_by_nccl(module).same_as(module)
    exe = rh.compile(module, allreduce_strategy="nccl")
    np.testing.assert_array_equal(rh.vm.VirtualMachine(exe)["main"](np.ones(4, "float32")).numpy(), np.ones(4))
