"""exe.memory_plan: bytes of each function on each device, and the lower bound for any plan."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from relax_hetero.artifact.commands import ARENA, SLOT, Dispatch, KernelSpec, Reference, RegionSpec, TensorParam
from relax_hetero.artifact.memory_plan import MemoryPlan
from relax_hetero.artifact.memory_spec import CallStep, FunctionMemory, Live, RegionStep, StorageSpec
from relax_hetero.artifact.memory_use import PAGE, Allocation, Use, max_alive, pool_bytes
from relax_hetero.artifact.metadata import ConstantSpec, DeviceSpec, Metadata
from vm.conftest import Chain

CPUS = (DeviceSpec('{"kind": "llvm"}', 0, default=True), DeviceSpec('{"kind": "llvm"}', 1))
MiB = 1 << 20


def metadata(*memory, **more):
    return Metadata(devices=CPUS, host_index=1, signatures={}, memory=memory, **more)


def test_static_storage_shared_and_not():
    main = FunctionMemory(
        "main",
        (
            StorageSpec(0, 4 * MiB, 0, 2, "value", "a"),
            StorageSpec(0, 3 * MiB, 1, 1, "value", "b"),
            StorageSpec(1, MiB, 1, -1, "result", "r"),
            StorageSpec(1, 2 * MiB, 2, 2, "transfer", "t"),
        ),
        # a, then the value that reuses its storage; b, which only the second step has
        (
            Live(0, 4 * MiB, 0, 1),
            Live(0, MiB, 2, 2),
            Live(1, 3 * MiB, 1, 1),
            Live(2, MiB, 1, 1),
            Live(3, 2 * MiB, 2, 2),
        ),
    )
    weights = (ConstantSpec("w", (16, 16), "float16", 0), ConstantSpec("v", (3,), "int64", 1))
    use = MemoryPlan(metadata(main, constants=weights)).at("main")
    first, second = use.devices
    assert (first.weights, first.transient, first.lower_bound, first.results) == (512, 7 * MiB, 7 * MiB, 0)
    assert first.largest == (("a", 4 * MiB), ("b", 3 * MiB))
    assert (second.weights, second.transient, second.transfers, second.results) == (24, 2 * MiB, 2 * MiB, MiB)
    assert (use.transient, use.lower_bound) == (9 * MiB, 9 * MiB)


def test_tensors_in_an_arena_are_counted_by_its_commands():
    """Two slots and two tensors in the arena: the input ends before the second of them begins."""
    kernel = KernelSpec(
        "k",
        0,
        tuple(TensorParam(name, "uint8", ("n",), 64, access) for name, access in (("a", "read"), ("b", "write"))),
    )
    inside = [Reference(ARENA, 0, offset, "n*100") for offset in (0, "n*100")]
    commands = (
        Dispatch("k", (Reference(SLOT, 0, 0, "n*100"), inside[0])),
        Dispatch("k", (inside[0], inside[1])),
        Dispatch("k", (inside[1], Reference(SLOT, 1, 0, "n*30"))),
    )
    region = RegionSpec("main_commands", "main", 0, (), ("n",), (), "n*200", commands)
    main = FunctionMemory(
        "main",
        (
            StorageSpec(0, "n*100", 0, 1, "value", "x"),
            StorageSpec(0, "n*30", 1, 2, "value", "y"),
            StorageSpec(0, "n*200", 1, 1, "arena", "the arena"),
        ),
        (Live(0, "n*100", 0, 1), Live(1, "n*30", 1, 2), Live(2, 0, 1, 1)),
        (RegionStep(1, "main_commands", (0, 1)),),
    )
    plan = MemoryPlan(metadata(main, regions=(region,), kernels={"k": kernel}))
    (memory, _) = plan.at("main", n=10000).devices
    # x and the first; both in the arena; the second and y.
    assert (memory.transient, memory.arenas, memory.lower_bound) == (3_300_000, 2_000_000, 2_000_000)
    graph = MemoryPlan(metadata(main, regions=(replace(region, arena=64, runs="CUDA graph"),), kernels={"k": kernel}))
    assert graph.at("main", n=10000).devices[0].weights == 64


def test_the_arena_of_a_graph_of_symbolic_extents_counts_with_its_calls():
    kernel = KernelSpec("k", 0, (TensorParam("a", "uint8", (), 1, "read"), TensorParam("b", "uint8", (), 1, "write")))
    inside = Reference(ARENA, 0, 0, "n*100")
    commands = (
        Dispatch("k", (Reference(SLOT, 0, 0, "n*10"), inside)),
        Dispatch("k", (inside, Reference(SLOT, 1, 0, 4))),
    )
    region = RegionSpec("main_commands", "main", 0, (), ("n",), (), "n*100", commands, runs="CUDA graph")
    steps = (RegionStep(0, "main_commands", (-1, -1)),)
    plan = MemoryPlan(metadata(FunctionMemory("main", (), (), steps), regions=(region,), kernels={"k": kernel}))
    memory = plan.at("main", n=10).devices[0]
    assert (memory.weights, memory.transient, memory.arenas, memory.lower_bound) == (0, 1000, 1000, 1000)


def test_called_functions_and_one_that_calls_itself():
    inner = FunctionMemory(
        "inner",
        (StorageSpec(0, "k*8", 0, 1, "value", "t"), StorageSpec(0, "k", 1, -1, "result", "r")),
        (Live(0, "k*8", 0, 1), Live(1, "k", 1, 1)),
        calls=(CallStep(0, "inner", {"k": "k"}),),
    )
    main = FunctionMemory(
        "main",
        (StorageSpec(0, PAGE, 0, 3, "value", "a"), StorageSpec(0, "n*2", 2, 3, "value", "inner")),
        (Live(0, PAGE, 0, 3), Live(1, "n*2", 2, 3)),
        calls=(CallStep(1, "inner", {"k": "n*2"}),),
    )
    memory = MemoryPlan(metadata(inner, main)).at("main", n=PAGE).devices[0]
    assert memory.transient == PAGE + 16 * PAGE + 2 * PAGE
    assert memory.lower_bound == PAGE + 16 * PAGE
    assert memory.results == 0


def test_sizes_that_are_missing_and_upper_bounds():
    main = FunctionMemory(
        "main", (StorageSpec(0, "n*m", 0, 0, "value", "a"),), (Live(0, "n*m", 0, 0),), (), (), {"n": 7}
    )
    plan = MemoryPlan(metadata(main))
    assert plan.symbolic_dims() == ("m",)
    assert plan.at(m=3).devices[0].transient == 21
    assert plan.at(m=3, n=2).devices[0].transient == 6
    with pytest.raises(rh.BindingError, match=r"the memory of 'main' depends on m: give its value, as in .*m=1"):
        plan.at()
    with pytest.raises(rh.BindingError, match="the memory plan has no function 'mian'.*did you mean 'main'"):
        plan.at("mian")


_uses = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 5 * PAGE), st.integers(0, 12), st.integers(0, 6)), max_size=20
)


@given(_uses)
@settings(max_examples=150, deadline=None)
def test_most_alive_counts_every_moment(uses):
    listed = [Use(device, nbytes, (begin,), (begin + length, float("inf"))) for device, nbytes, begin, length in uses]
    for device in (0, 1):
        alive = [sum(n for d, n, b, length in uses if d == device and b <= now <= b + length) for now in range(20)]
        assert max_alive(listed, device) == max(alive)


@given(_uses)
@settings(max_examples=150, deadline=None)
def test_the_pool_hands_on_by_pages(uses):
    """The pool needs as many buffers of a page count as were alive at one time."""
    listed = [
        Allocation(device, nbytes, (begin,), (begin + length, float("inf")), "value", str(number))
        for number, (device, nbytes, begin, length) in enumerate(uses)
    ]
    buffers = pool_bytes(listed, 0)
    expected = 0
    for pages in range(6):
        of_size = [(b, b + length) for d, n, b, length in uses if d == 0 and -(-n // PAGE) == pages]
        expected += max(sum(begin <= now <= end for begin, end in of_size) for now in range(20))
    assert len(buffers) == expected
    assert sum(n for _, n in buffers) <= sum(n for d, n, _, _ in uses if d == 0)


@pytest.fixture(scope="module")
def chain():
    return rh.compile(Chain)


def test_a_compiled_chain(chain):
    use = chain.memory_plan.at("main", n=1000)
    # exp gives a result, add another; a transfer between CPUs moves nothing.
    assert [(m.device, m.transient, m.results) for m in use.devices] == [("llvm:0", 0, 16000), ("llvm:1", 0, 16000)]
    assert chain.memory_plan.symbolic_dims("main") == ("n",)
    assert "main      depends on n: at(...)" in str(chain.memory_plan)
    assert str(use).splitlines()[0].split() == [
        *("function", "device", "weights", "transient", "arenas", "transfers", "results", "lower", "bound", "ratio")
    ]


def test_it_survives_export(chain, tmp_path):
    chain.export_library(tmp_path / "chain.so")
    loaded = rh.load(tmp_path / "chain.so")
    assert loaded.metadata.memory == chain.metadata.memory
    assert loaded.memory_plan.at(n=5) == chain.memory_plan.at(n=5)
