"""Launches of GPU kernels: shared memory keeps its allocated size, whatever addresses TVM sees."""

from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm_ffi import structural_walk

from gpu_interpreter import lowered
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.core.builder import Function
from relax_hetero.tir.cuda.core import ptx
from relax_hetero.tir.cuda.core.launch import SharedMemory, launch, local


def test_shared_memory_keeps_its_size() -> None:
    function = Function("copied", registers="local")
    with function:
        a = function.argument("a", (4,), "uint32")
        with function.body():
            shared = SharedMemory()
            skipped, used = shared.reserve(100), shared.reserve(4096, 1024)
            with launch(1, 32) as place:
                shared.open()
                value = local(4, "uint32")
                # Sixteen bytes; only the address of the first one is in the code.
                ptx.load_shared([value[i] for i in range(4)], shared.at(used + 4080))
                a_index = place.thread // 32
                T.buffer_store(a, value[0], [a_index])
    assert skipped == 0 and used == 1024 and shared.size == 5120
    assert is_one_launch(function.result)
    sizes = []

    def note(allocation) -> None:
        if allocation.buffer.scope() == "shared.dyn":
            sizes.extend(int(extent) for extent in allocation.buffer.shape)

    structural_walk(lowered(function.result).body, (tirx.AllocBuffer, note))
    assert sizes == [5120]
