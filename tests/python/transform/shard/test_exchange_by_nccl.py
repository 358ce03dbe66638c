"""ExchangeByNccl: kernels before and after NCCL's sums, where NCCL sums, and what explanations say."""

from itertools import pairwise

import numpy as np
import pytest
import tvm
from tvm.script import relax as R
from tvm_ffi import structural_walk

import relax_hetero as rh
from modules import calls_of, ir_module, ops_of
from relax_hetero.artifact.commands import GRAPH
from relax_hetero.artifact.metadata import Metadata
from relax_hetero.artifact.nccl_layout import NCCL_COLLECTIVE, NCCL_MEMORY, from_numbers, transfers
from relax_hetero.artifact.peer_layout import PEER_MEMORY
from relax_hetero.tir.cuda.nccl_kernels import AFTER_NCCL
from relax_hetero.transform.ir.rewriting import walk_bindings
from relax_hetero.transform.pipeline import pipeline_steps
from relax_hetero.transform.record import command_regions
from relax_hetero.transform.record.region_attrs import regions_of
from relax_hetero.transform.shard import exchange_by_nccl as subject
from relax_hetero.transform.shard.exchange_by_nccl import collectives_of, exchange_by_nccl
from relax_hetero.transform.shard.exchanges import Exchanges
from relax_hetero.transform.shard.partition_by_mesh import partition_by_mesh
from transform.shard.test_gpu_sums import DOWN, GPUS, UP, WIDTH, layers, lone_sum, shapes_of
from transform.shard.test_partition_by_mesh import RandomGraph

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
        monkeypatch.setattr(subject, "can_access_peer", lambda gpu, peer: reaches)

    yield choose
    subject.unreachable.cache_clear()


def kernels_of(module, name):
    """Calls of kernels by the rank of their GPU."""
    calls = [call for call in calls_of("relax.call_tir", module) if name in call.args[0].name_hint]
    return calls[0::2], calls[1::2]


def test_results_are_those_of_the_kernels(both):
    before, after = both
    assert exchange_by_nccl(after).same_as(after)
    for old, stages, new in zip(
        *(kernels_of(*pair) for pair in ((before, "all_"), (after, "st"), (after, "all_"))), strict=True
    ):
        assert [shapes_of(call) for call in new] == [shapes_of(call) for call in old] and len(old) == 2
        values = {binding.var: binding.value for binding in walk_bindings(after["main"].body)}
        for kernel, stage, call in zip(old, stages, new, strict=True):
            x, _, last, *rest = kernel.args[1].fields
            operands, (_, token, *weight) = stage.args[1].fields, call.args[1].fields
            assert values[token].same_as(stage)
            residual = operands[3:]
            assert [*residual, *weight] == rest or all(
                a.same_as(b) for a, b in zip([*residual, *weight], rest, strict=True)
            )
            assert operands[0].same_as(x) and operands[2].same_as(last)


def test_memory_is_for_all_sums_of_a_function(both):
    _, after = both
    calls = calls_of("relax.call_pure_packed", after)
    rows = int(after["main"].params[0].ty.shape.values[0])
    assert {str(call.args[0].global_symbol) for call in calls} == {NCCL_MEMORY}
    assert [[int(arg) for arg in call.args[1:]] for call in calls] == [
        [gpu, 2, 0, 1, 1, rows * WIDTH] for gpu in (0, 1)
    ]
    ranks = [
        list(map(int, func.attrs[AFTER_NCCL])) for func in after.functions.values() if AFTER_NCCL in (func.attrs or {})
    ]
    assert sorted(ranks) == [[0, gpu, 0, 1] for gpu in (0, 0, 1, 1)]


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
    assert (first.variable, first.function, first.devices, first.joined) == ("a_sum", "main", (0, 1), ("norm",))
    assert (second.algorithm, second.joined) == ("NCCL", () if is_short else ("residual",))
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
@pytest.mark.parametrize("seed", [12, 43, 58, 79, 93])  # those among the first hundred that have exchanges and sums
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
def test_an_exchange_has_all_tensors_that_are_there():
    """The halves of both GPUs are gathered on both: one exchange; what one GPU sends alone is a copy."""

    @ir_module(*GPUS)
    def module(x: R.Tensor((4, WIDTH), "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.nn.softmax(R.matmul(R.matmul(x, R.const(UP)), R.const(DOWN)))
            b = R.nn.relu(R.hetero.shard(a, "S[1]"))
            c = R.matmul(R.hetero.shard(b, "R"), R.const(UP))
            R.output(c)
        return c

    before = partition_by_mesh(module)
    after = exchange_by_nccl(before)
    assert [ops_of(each).count("relax.to_vdevice") for each in (before, after)] == [4, 2]
    (exchange,) = (spec for spec in collectives_of(after) if spec.op == "exchange")
    assert exchange.bytes == 2 * 4 * WIDTH // 2 * 4 and exchange.devices == (0, 1)
    (descriptions,) = {tuple(map(int, call.args[2:])) for call in calls_of("relax.call_pure_packed", after)}
    sums, crossing = from_numbers(descriptions[3:])
    assert sums == (4 * WIDTH,) and sorted(transfers(crossing)) == [(0, 1, 512), (1, 0, 512)]


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
