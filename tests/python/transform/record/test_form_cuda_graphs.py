"""Command buffers of CUDA devices as graphs: what the module becomes, and the code; the GPU tests run them."""

import logging

import numpy as np
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import callees, ir_module
from relax_hetero.artifact.commands import GRAPH
from relax_hetero.artifact.graph_layout import FILLED_AT_ONCE, Layout
from relax_hetero.driver.commands.command_metadata import graph_tables
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.tir.cuda.core.launch import READS_EARLY
from relax_hetero.transform.ir.module_attrs import COMMANDS
from relax_hetero.transform.record.donated import with_donated
from relax_hetero.transform.record.form_cuda_graphs import GRAPH_CONSTANTS, FormCudaGraphs, form_cuda_graphs
from relax_hetero.transform.record.region_attrs import kernels_of, regions_of
from relax_hetero.vm.region import cuda_graph

CUDA = {"kind": "cuda", "arch": "sm_90"}


@ir_module({"kind": "cuda", "arch": "sm_90"})
class Steps:
    @T.prim_func(private=True, s_tir=True)
    def step(A: T.Buffer((16,), "float32"), C: T.Buffer((16,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(16):
            with T.sblock("C"):
                v = T.axis.spatial(16, i)
                C[v] = A[v] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def join(A: T.Buffer((16,), "float32"), W: T.Buffer((16,), "float32"), C: T.Buffer((16,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(16):
            with T.sblock("C"):
                v = T.axis.spatial(16, i)
                C[v] = A[v] * W[v]

    @R.function
    def main(x: R.Tensor((16,), "float32", "cuda:0"), w: R.Tensor((16,), "float32", "cuda:0")):
        cls = Steps
        with R.dataflow():
            a = R.call_tir(cls.step, (x,), out_ty=R.Tensor((16,), "float32", "cuda:0"))
            b = R.call_tir(cls.step, (a,), out_ty=R.Tensor((16,), "float32", "cuda:0"))
            c = R.call_tir(cls.step, (b,), out_ty=R.Tensor((16,), "float32", "cuda:0"))
            d = R.call_tir(cls.join, (c, w), out_ty=R.Tensor((16,), "float32", "cuda:0"))
            e = R.call_tir(
                cls.join, (d, R.const(np.arange(16, dtype="float32"))), out_ty=R.Tensor((16,), "float32", "cuda:0")
            )
            R.output(c, e)
        return (c, e)


def recorded(mod):
    for step in rh.get_pipeline().passes[:-1]:
        mod = step(mod)
    return mod


def functions(mod):
    return {gv.name_hint: func for gv, func in mod.functions.items()}


def sources(module):
    texts = [module.inspect_source()] if module.kind == "cuda" else []
    return "".join([*texts, *(sources(part) for part in module.imports)])


def host_code(module):
    texts = [module.inspect_source("ll")] if module.kind == "llvm" else []
    return "".join([*texts, *(host_code(part) for part in module.imports)])


# Placeholder that each machine replaces by memory of its own.
STATE = tvm.ir.GenericConst(
    tvm.runtime.tensor(np.zeros(Layout(4).state_words, "int64")),
    relax.TensorType((Layout(4).state_words,), "int64", Steps.global_infos["vdevice"][0]),
)


@ir_module({"kind": "cuda", "arch": "sm_90"})
class Expected:
    """The graph reads its arguments from a table in `STATE`; the arena and constants belong to what was recorded."""

    @T.prim_func(private=True, s_tir=True)
    def main_commands(x: T.handle, w: T.handle, state: T.handle, c: T.handle, e: T.handle):
        T.evaluate(0)

    @R.function
    def main(x: R.Tensor((16,), "float32", "cuda:0"), w: R.Tensor((16,), "float32", "cuda:0")):
        cls = Expected
        with R.dataflow():
            buffer = R.call_tir(
                cls.main_commands,
                (x, w, STATE),
                out_ty=[R.Tensor((16,), "float32", "cuda:0"), R.Tensor((16,), "float32", "cuda:0")],
            )
            c: R.Tensor((16,), "float32", "cuda:0") = buffer[0]
            e: R.Tensor((16,), "float32", "cuda:0") = buffer[1]
            R.output(c, e)
        return (c, e)


def test_calls_of_command_buffers_become_calls_of_graphs():
    mod = FormCudaGraphs()(recorded(Steps))
    assert_structural_equal(mod["main"], Expected["main"], map_free_vars=True)


def test_the_functions_of_the_module_after_the_pass():
    before = recorded(Steps)
    mod = FormCudaGraphs()(before)
    main = functions(mod)["main"]
    _, (table,) = graph_tables(rh.transform.LowerToVM()(mod))
    (call,) = [b.value for block in main.body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
    state = call.args[1].fields[-1]
    assert [str(arg.name) for arg in call.args[1].fields[:-1]] == ["x", "w"] and state.same_as(table.tensor)
    assert len(table.constants) == 1 and table.region == "main_commands" and table.kernels == []
    assert state.value.shape == (Layout(4).state_words,)
    assert [list(map(int, ty.shape.values)) for ty in call.ty_args[0].fields] == [[16], [16]]  # no arena
    (region,) = regions_of(mod)
    assert region.runs == "CUDA graph" and region.arena > 0
    assert regions_of(before)[0].runs == "stream" and kernels_of(mod) == kernels_of(before)
    assert form_cuda_graphs(mod).same_as(mod)


def test_constants_of_a_graph_travel_with_it_until_the_module_is_linked():
    mod = form_cuda_graphs(recorded(Steps))
    assert len(functions(mod)["main_commands"].attrs[GRAPH_CONSTANTS]) == 1
    plain, _ = graph_tables(rh.transform.LowerToVM()(mod))
    assert GRAPH_CONSTANTS not in functions(plain)["main_commands"].attrs


def test_kernels_read_the_table_only_for_bindings():
    by_name = functions(form_cuda_graphs(recorded(Steps)))
    assert {"step_table", *EARLY} <= set(by_name)
    # Each call of `join` has a binding; variants that no launch uses are not compiled.
    assert not {"join", "step", "join_table", "step_table_1"} & set(by_name)
    names = ("fill_table", "step_table_2", "step_table", *EARLY)
    assert [name for name in callees(by_name["main_commands_record"].body) if name in names] == list(names)
    assert COMMANDS not in by_name["main_commands_record"].attrs


def marked(mod, **reads):
    """The module with notes at kernels that wait for launches before them where they were written to."""
    functions = {
        gv: func.with_attr(READS_EARLY, reads[gv.name_hint]) if gv.name_hint in reads else func
        for gv, func in mod.functions.items()
    }
    return tvm.IRModule(functions, global_infos=mod.global_infos)


def early(by_name):
    """Kernels that begin early, and whether they wait before all else."""
    tagged = {name: func for name, func in by_name.items() if "tirx.kernel_launch_params" in func.attrs}
    # The CUDA compiler must not take operands for constant.
    assert not any(func.attrs["tirx.noalias"] for func in tagged.values())
    texts = {name: func.script() for name, func in tagged.items()}
    return {name: 0 < text.find("griddepcontrol") < text.index("threadIdx") for name, text in texts.items()}


EARLY = ("step_early", "step_table_1_early", "join_table_early", "join_table_1_early")


def test_every_kernel_but_the_first_begins_early_and_waits():
    by_name = functions(form_cuda_graphs(recorded(Steps)))
    # The first step brings the table; the others wait before they read addresses there.
    assert early(by_name) == dict.fromkeys(EARLY, True)
    assert [name for name in callees(by_name["main_commands_record"].body) if name in EARLY] == list(EARLY)
    text = by_name["step_table_1_early"].script()
    assert 0 < text.find("launch_dependents") < text.index("words"), text
    # Others may come before they wait, but none before the table is there.
    lets_first = [f.find("launch_dependents") < f.find("wait") for f in (by_name[name].script() for name in EARLY)]
    assert lets_first == [False, True, True, True]


def test_kernels_wait_where_they_were_written_to_if_nothing_they_read_is_fresh():
    """Reads before the wait: addresses in the table, which the first launch brings, constants and inputs."""
    mod = recorded(Steps)
    flags = early(functions(form_cuda_graphs(marked(mod, join=[1]))))
    assert flags == dict(zip(EARLY, (True, True, False, False), strict=True)), "operand 1 is an input, or a constant"
    flags = early(functions(form_cuda_graphs(marked(mod, join=[0]))))
    assert flags == dict.fromkeys(EARLY, True), "launches before write operand 0: a result, or the arena"
    flags = early(functions(form_cuda_graphs(marked(mod, join=[], step=[]))))
    assert flags == dict(zip(EARLY, (True, False, False, False), strict=True)), "the next would read a fresh table"


def test_a_product_of_an_older_operand_waits_in_its_epilogue():
    """The second product of a gated network begins while the first one ends, the third one reads what it writes."""
    shape, generator = (2048, 64), np.random.default_rng(0)
    up, gate, down = (
        generator.standard_normal(size).astype("float16") for size in [(64, 3072), (64, 3072), (3072, 64)]
    )

    @ir_module({"kind": "cuda", "arch": "sm_90a"})
    def module(x: R.Tensor(shape, "float16", "cuda:0")):
        with R.dataflow():
            y = R.nn.relu(x)
            a = R.nn.silu(R.matmul(y, R.const(gate)))
            b = R.multiply(R.matmul(y, R.const(up)), a)
            c = R.nn.relu(R.matmul(b, R.const(down)))
            R.output(c)
        return c

    by_name = functions(form_cuda_graphs(recorded(module)))
    products = [name for name in callees(by_name["main_commands_record"].body) if name.startswith("matmul")]
    texts = [by_name[name].script() for name in products]
    waits = [text.index("griddepcontrol") > text.index("mbarrier_wait") for text in texts]
    assert waits == [False, True, False], products


def test_sums_of_gpus_read_constants_before_they_wait():
    """Addresses of the GPUs' memory and a norm's weight; a long sum, of more than 512 KB, waits first."""
    weights = [np.ones(shape, "float16") for shape in [(4096, 64), (64, 4096)]]
    scale = np.ones(4096, "float32")

    def waits(rows):
        @ir_module({"kind": "cuda", "arch": "sm_90a"}, ({"kind": "cuda", "arch": "sm_90a"}, 1))
        def module(x: R.Tensor((rows, 4096), "float16", "cuda[0:2]")):
            with R.dataflow():
                a = R.matmul(R.matmul(x, R.const(weights[0])), R.const(weights[1]), out_dtype="float32")
                b = R.astype(R.nn.rms_norm(a, R.const(scale), axes=[-1]), "float16")
                c = R.matmul(b, R.const(weights[0]))
                R.output(c)
            return c

        by_name = functions(form_cuda_graphs(recorded(rh.transform.PartitionByMesh(by_cost=False)(module))))
        records = [func for name, func in by_name.items() if name.endswith("_record")]
        assert len(records) == 2
        for func in records:
            for name in [name for name in callees(func.body) if "all_reduce" in name]:
                text = by_name[name].script()
                assert text.count("griddepcontrol") == 2
                yield text.index("griddepcontrol") > text.index("bases[") and "rh_all_reduce_short<" in text

    assert [*waits(32)] == [True] * 4  # the only sum of a function is computed twice
    assert [*waits(48)] == [False] * 4


def test_gpus_that_cannot_begin_early_do_not():
    older = rh.VDevice({"kind": "cuda", "arch": "sm_89"})
    by_name = functions(form_cuda_graphs(recorded(rh.transform.UpdateVDevice(older, 0)(Steps))))
    assert not early(by_name) and "main_commands_record" in by_name


def test_memory_of_a_graph_with_several_constants():
    builder, device = relax.BlockBuilder(), rh.VDevice(CUDA)
    y = x = relax.Var("x", relax.TensorType((8, 16), "float32", device))
    with builder.function("main", [x]):
        with builder.dataflow():
            for _ in range(3):
                y = builder.emit(relax.op.matmul(y, relax.const(np.ones((16, 16), "float32"))))
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    exe = rh.compile(with_vdevices(builder.get(), [device]))
    ((region,), (memory,)) = exe.metadata.regions, exe.metadata.memory
    (step,) = memory.regions
    assert region.runs == GRAPH and len(region.directs) == 3
    assert len(step.slots) == len(region.slots) and step.slots[0] == -1  # the argument is the caller's
    assert memory.storages[memory.tensors[step.slots[1]].storage].nbytes == 8 * 16 * 4


def test_code_of_a_graph():
    exe = rh.compile(Steps)
    code = sources(exe.module)
    for kernel in ("step_early", "step_table", "join_table_early", "fill_table"):
        assert f" {kernel}_kernel(" in code
    assert "fetch_table" not in code  # the first kernel is one block, and fetches the bindings itself
    fetching = code[code.rindex(" step_table_2_kernel(") :].split("{", 1)[1]
    order = [fetching.index(text) for text in ("ring[", "consumed[0] =", "__syncthreads();\n  float* A", "C_data")]
    assert order == sorted(order)
    (region,) = exe.metadata.regions
    (state,) = [spec for spec in exe.metadata.constants if spec.region]
    assert state.region == region.name and state.addresses == region.directs and len(region.directs) == 1


def test_bindings_are_fetched_by_a_kernel_of_its_own_before_many_blocks():
    builder = relax.BlockBuilder()
    device = rh.VDevice(CUDA)
    x = relax.Var("x", relax.TensorType((64, 1000), "float32", device))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.permute_dims(builder.emit(relax.op.nn.softmax(x))))
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    mod = builder.get()
    mod.update_global_info("vdevice", [device])
    by_name = functions(form_cuda_graphs(recorded(mod)))
    names = ["fetch_table", "fill_table", "softmax_64x1000_cuda_0_table_early", "transpose_table_early"]
    assert callees(by_name["main_commands_record"].body) == names


def test_more_slots_than_one_kernel_fills():
    builder = relax.BlockBuilder()
    device = rh.VDevice(CUDA)
    xs = [relax.Var(f"x{i}", relax.TensorType((8,), "float32", device)) for i in range(FILLED_AT_ONCE + 5)]
    with builder.function("main", xs):
        with builder.dataflow():
            total = xs[0]
            for x in xs[1:]:
                total = builder.emit(relax.op.matmul(total, x))
                total = builder.emit(relax.op.add(relax.op.reshape(total, (1,)), x))
            total = builder.emit_output(total)
        builder.emit_func_output(total)
    mod = builder.get()
    mod.update_global_info("vdevice", [device])
    formed = form_cuda_graphs(recorded(mod))
    (region,) = regions_of(formed)
    assert len(region.slots) > FILLED_AT_ONCE
    by_name = functions(formed)
    assert callees(by_name["main_commands_record"].body).count("fill_table") == 2
    assert "fetch_table" in by_name


def symbolic():
    builder = relax.BlockBuilder()
    device = rh.VDevice(CUDA)
    x = relax.Var("x", relax.TensorType((tvm.tirx.Var("n", "int64"), 64), "float32", device))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(
                relax.op.nn.softmax(builder.emit(relax.op.matmul(x, relax.const(np.eye(64, dtype="float32")))))
            )
            y = builder.emit_output(
                relax.op.nn.softmax(builder.emit(relax.op.matmul(y, relax.const(np.eye(64, dtype="float32")))))
            )
        builder.emit_func_output(y)
    mod = builder.get()
    mod.update_global_info("vdevice", [device])
    return mod


def test_symbolic_extents_are_parameters_of_graphs():
    """Submitting finds a graph by its extents; recording takes them."""
    mod = form_cuda_graphs(recorded(symbolic()))
    (region,) = regions_of(mod)
    assert region.runs == "CUDA graph" and region.parameters == ("n",) and isinstance(region.arena, str)
    main, record = functions(mod)["main"], functions(mod)["main_commands_record"]
    assert [str(param.name) for param in record.params] == ["plan", "n"]
    (call,) = [b.value for block in main.body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
    assert call.args[1].fields[-1].value.shape == (Layout(2, 1).state_words,)
    (memory,) = (exe := rh.compile(symbolic())).metadata.memory
    (step,) = memory.regions
    assert len(step.slots) == 2 and exe.memory_plan.at("main", n=100).devices[0].arenas == 100 * 64 * 4
    assert "fetch_table" in sources(exe.module)
    assert "AllocWorkspace" not in host_code(exe.module), "the host cannot use what it allocates for a GPU"


def test_symbols_without_an_extent_are_passed_to_graphs():
    """Here 2 * n stands in the types, and n in none of them."""
    n, device = tvm.tirx.Var("n", "int64"), rh.VDevice(CUDA)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n * 2, 64), "float32", device))
    shape = relax.Var("shape", relax.ShapeType([n]))
    weight = relax.const(np.eye(64, dtype="float32"))
    with builder.function("main", [x, shape]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.softmax(builder.emit(relax.op.matmul(x, weight))))
            y = builder.emit_output(relax.op.nn.softmax(builder.emit(relax.op.matmul(y, weight))))
        builder.emit_func_output(y)
    mod = form_cuda_graphs(recorded(with_vdevices(builder.get(), [device])))
    (region,) = regions_of(mod)
    assert region.runs == "CUDA graph" and region.parameters == ("n",)
    assert [str(param.name) for param in functions(mod)["main_commands"].params] == [
        "x",
        "state",
        "n",
        region.slots[-1].name,
    ]
    rh.compile(with_vdevices(builder.get(), [device]))


def test_donated_arguments_stay_results_of_graphs():
    device = rh.VDevice(CUDA)
    x, y = (relax.Var(name, relax.TensorType((64, 64), "float32", device)) for name in "xy")
    builder, weight = relax.BlockBuilder(), relax.const(np.ones((64, 64), "float32"))
    with builder.function("main", [x, y]):
        with builder.dataflow():
            a = builder.emit(relax.op.nn.softmax(builder.emit(relax.op.matmul(y, weight))))
            total = builder.emit(relax.op.add(x, builder.emit(relax.op.matmul(a, weight))))
            out = builder.emit_output(relax.op.nn.softmax(builder.emit(relax.op.matmul(total, weight))))
            total = builder.emit_output(total)
        builder.emit_func_output(relax.Tuple([total, out]))
    mod = with_vdevices(builder.get(), [device])
    exe = rh.compile(mod, donate=["x"])
    (region,) = exe.metadata.regions
    assert region.runs == "CUDA graph" and region.arena > 0
    assert {slot.name: slot.access for slot in region.slots}["x"] == "read-write"
    before = recorded(with_donated(mod, ["x"]))
    after = form_cuda_graphs(before)
    calls = [[b.value for block in functions(m)["main"].body.blocks for b in block.bindings] for m in (before, after)]
    fields = [[value.index for value in values if isinstance(value, relax.TupleGetItem)] for values in calls]
    assert fields == [[0, 2], [0, 1]] or fields == [[2, 0], [1, 0]], "the arena stood between them"


def test_modules_without_cuda_and_lowered_ones_are_left():
    x = relax.Var("x", relax.TensorType((8,), "float32", device := rh.VDevice(rh.native("llvm"))))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.cumsum(builder.emit(relax.op.cumsum(x)))))
    mod = builder.get()
    mod.update_global_info("vdevice", [device])
    mod = recorded(mod)
    assert form_cuda_graphs(mod).same_as(mod) and graph_tables(mod) == (mod, [])
    lowered = rh.get_pipeline()(Steps)
    assert form_cuda_graphs(lowered).same_as(lowered)


def test_stock_tvm_builds_the_pipelines_module():
    built = tvm.compile(Steps, relax_pipeline=rh.get_pipeline())
    assert " step(" in sources(built.mod)


def test_an_executable_without_graphs_needs_no_state(caplog):
    exe = rh.compile(symbolic(), command_buffers=False)
    with caplog.at_level(logging.WARNING, "relax_hetero"):
        assert cuda_graph.make_graphs(exe.metadata, [], constants := [], None) == (constants, [])
    assert not caplog.records
