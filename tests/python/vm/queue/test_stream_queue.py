"""Calls through queues of GPUs, with a driver in Python that runs streams as late as it can.

Kernels are functions that give numpy work on plain addresses to a stream, and their results lie in memory that is
reused as soon as no tensor is left over it, as in TVM's pool: what is given back or read too early gives wrong numbers.
"""

import random
import threading
import weakref
from concurrent.futures import CancelledError
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
import tvm_ffi

from relax_hetero.artifact.schedule import Schedule, Step
from relax_hetero.errors import HeteroError
from relax_hetero.vm.device import cuda_library
from relax_hetero.vm.device.cuda_library import CudaLibrary
from relax_hetero.vm.device.cuda_memory import DeviceBlock, PinnedBlock
from relax_hetero.vm.device.cuda_streams import wait_checks
from relax_hetero.vm.device.machine_lock import MachineLock
from relax_hetero.vm.device.memory_pools import BlockPool
from relax_hetero.vm.device.tensors import alias
from relax_hetero.vm.queue import stream_queue
from relax_hetero.vm.queue.call import PreparedCall
from relax_hetero.vm.queue.plan import QueuePlan
from relax_hetero.vm.queue.queued_calls import QueuedCalls
from relax_hetero.vm.queue.queues import Queues
from seeds import fresh_rng
from vm.fake_cuda import LOST, FakeCuda

LENGTH = 700
SECONDS = 20
DEVICES = [tvm.cpu(0), tvm.cuda(0), tvm.cpu(1), tvm.cuda(1)]
CPU, GPU, CPU_1, GPU_1 = range(4)


def on_host(tensor):
    return np.from_dlpack(alias(tensor, tvm.cpu(0)))


def memory_of(address):
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * LENGTH).from_address(address))


def combined(number, output, *arrays):
    """Result of a step's kernel for its operands."""
    return sum((position + 2) * array for position, array in enumerate(arrays)) * 3 + 10 * number + output


class Machine:
    """Queues over the fake driver, and kernels for the steps of a schedule."""

    def __init__(self, monkeypatch, schedule, seed=None, max_in_flight=3):
        self.schedule, self.chance = schedule, random.Random(seed)
        self.cuda = FakeCuda(seed)
        self.library = CudaLibrary(self.cuda.library, self.cuda.library)
        kinds = [PinnedBlock if device.dlpack_device_type() == 1 else DeviceBlock for device in DEVICES]
        self.pools = [BlockPool(partial(kind, self.library, 0), 1 << 30) for kind in kinds]
        self.failing, self.failures, self.failed, self.holding = set(), 0.0, 0, None
        monkeypatch.setattr(cuda_library, "cuda_library", lambda: self.library)
        monkeypatch.setattr(stream_queue, "empty", self.fresh)
        specs = tuple(SimpleNamespace(num_cores=1, numa_node=None, kind="any", host=None) for _ in DEVICES)
        metadata = SimpleNamespace(devices=specs, dispatches={}, checks=(), signatures={})
        me = weakref.proxy(self)  # queues end with their machine, unless they keep it
        functions = {s.function: Machine.kernel(me, number) for number, s in enumerate(schedule.steps) if s.function}
        make = partial(Queues, metadata, DEVICES, ["global"] * 4, tvm_ffi.convert([]), lambda: functions)
        self.calls = QueuedCalls(self, MachineLock(), max_in_flight, make)
        self.plan = None

    def tensor(self, device):
        return self.pools[device].tensor((LENGTH,), "int64", DEVICES[device])

    def fresh(self, shape, dtype, device):
        return BlockPool(partial(DeviceBlock, self.library, 0), 1 << 30).tensor(shape, dtype, device)

    def value(self, device, array):
        tensor = self.tensor(device)
        on_host(tensor)[:] = array
        return tensor

    def kernel(self, number):
        step = self.schedule.steps[number]

        def run(*operands):
            if self.holding is not None and step.device == CPU:
                assert self.holding.wait(SECONDS)
            assert all(str(operand.device) == str(DEVICES[step.device]) for operand in operands)
            outputs = [self.tensor(step.device) for _ in step.makes]
            reads, writes = ([tensor.data_ptr() for tensor in group] for group in (operands, outputs))

            def work():
                arrays = [memory_of(address).copy() for address in reads]
                for output, address in enumerate(writes):
                    memory_of(address)[:] = combined(number, output, *arrays)

            if step.device in (CPU, CPU_1):
                work()
            else:
                with self.cuda.lock:
                    self.library.use(0)  # as TVM does before it launches
                    self.cuda._push(int(tvm_ffi.get_raw_stream(DEVICES[step.device])), work)
            if number in self.failing or self.chance.random() < self.failures:
                self.failed += 1
                raise ValueError("kernel of bad luck")
            return outputs[0] if len(outputs) == 1 else tvm_ffi.convert(tuple(outputs))

        return run

    def submit(self, *arrays, inputs=None):
        def plan(values):
            self.plan = self.plan or QueuePlan(self.schedule, values)
            return self.plan

        def prepare(args, _kwargs):
            return PreparedCall(args, {}, lambda results: [on_host(result).copy() for result in results])

        values = inputs or [self.value(device, array) for device, array in zip(INPUTS, arrays, strict=True)]
        return self.calls.submit(None, plan, prepare, values, {})

    def expected(self, *arrays):
        values = dict(enumerate(arrays))
        for number, step in enumerate(self.schedule.steps):
            operands = [values[value] for value in step.reads]
            for output, value in enumerate(step.makes):
                values[value] = combined(number, output, *operands) if step.function else operands[0]
        return [values[value] for value in self.schedule.results]

    def check(self, fence, *arrays):
        for actual, expected in zip(fence.result(SECONDS), self.expected(*arrays), strict=True):
            np.testing.assert_array_equal(actual, expected)


INPUTS = [CPU, GPU]


def numbers():
    return [fresh_rng().integers(0, 1000, LENGTH) for _ in INPUTS]


def schedule_of(steps, results):
    values = max(value for step in steps for value in step.makes) + 1
    return Schedule("main", len(INPUTS), values, tuple(steps), tuple(results))


def random_schedule(chance, length):
    """Steps on all devices, copies between all, functions with several results and with several devices."""
    where, steps = list(INPUTS), []
    for number in range(length):
        value, device = chance.randrange(len(where)), chance.randrange(4)
        here = [v for v, at in enumerate(where) if at == device]
        if where[value] != device and (chance.random() < 0.6 or not here):
            steps.append(Step(device, (value,), (len(where),), source=where[value]))
            where.append(device)
            continue
        reads = tuple(chance.choice(here) for _ in range(chance.randint(1, 3)))
        makes = tuple(range(len(where), len(where) + chance.randint(1, 2)))
        also = tuple(other for other in range(4) if other != device) if chance.random() < 0.1 else ()
        steps.append(Step(device, reads, makes, f"step_{number}", other_devices=also))
        where += [device] * len(makes)
    results = chance.sample(range(len(where)), min(len(where), 4))
    return schedule_of(steps, results)


THERE_AND_BACK = schedule_of(
    [
        Step(CPU, (0,), (2,), "on_cpu"),
        Step(GPU, (2,), (3,), source=CPU),
        Step(GPU, (3, 1), (4,), "on_gpu"),
        Step(GPU, (4, 3), (5,), "again"),
        Step(GPU_1, (5,), (6,), source=GPU),
        Step(GPU_1, (6,), (7, 8), "on_the_other"),
        Step(CPU_1, (8,), (9,), source=GPU_1),
        Step(CPU_1, (9,), (10,), "last"),
    ],
    (10, 7, 3),
)


@pytest.mark.parametrize("seed", range(25))
def test_random_schedules(monkeypatch, seed):
    chance = random.Random(seed)
    machine = Machine(monkeypatch, random_schedule(chance, chance.randint(3, 24)), seed, chance.randint(1, 5))
    inputs = [numbers() for _ in range(12)]
    fences = [machine.submit(*arrays) for arrays in inputs]
    for fence, arrays in zip(fences, inputs, strict=True):
        machine.check(fence, *arrays)
    assert machine.calls.wait(SECONDS)


@pytest.mark.parametrize("others", [(), (GPU_1,)])
def test_a_fence_of_a_lost_gpu_ends(monkeypatch, others):
    machine = Machine(monkeypatch, schedule_of([Step(GPU, (1,), (2,), "on_gpu", other_devices=others)], (2,)))

    def check(seconds):
        if seconds > 0.02:
            raise HeteroError("cuda:0 is lost")

    monkeypatch.setitem(wait_checks, 0, check)
    with pytest.raises(HeteroError, match="cuda:0 is lost"):
        machine.submit(*numbers()).result(SECONDS)
    assert machine.calls.wait(SECONDS)
    monkeypatch.delitem(wait_checks, 0)
    inputs = numbers()
    machine.check(machine.submit(*inputs), *inputs)


@pytest.mark.parametrize("seed", range(100, 115))
def test_calls_that_fail_leave_the_others(monkeypatch, seed):
    """Kernels that a failed call has launched write to nobody's memory."""
    chance = random.Random(seed)
    machine = Machine(monkeypatch, random_schedule(chance, 20), seed, 4)
    machine.failures = 0.04
    inputs = [numbers() for _ in range(20)]
    fences = [machine.submit(*arrays) for arrays in inputs]
    for fence, arrays in zip(fences, inputs, strict=True):
        if fence.exception(SECONDS) is None:
            machine.check(fence, *arrays)
        else:
            with pytest.raises(HeteroError, match="failed: ValueError: kernel of bad luck"):
                fence.result()
    assert machine.calls.wait(SECONDS)


def test_many_threads_submit(monkeypatch):
    machine, failures = Machine(monkeypatch, THERE_AND_BACK, 1), []

    def work():
        try:
            for _ in range(10):
                arrays = numbers()
                machine.check(machine.submit(*arrays), *arrays)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not failures and not any(thread.is_alive() for thread in threads)


def hold_ends(machine):
    """Have nobody learn that work has ended, until the event that this returns is set."""
    gate, wait = threading.Event(), machine.library._functions["cuEventSynchronize"]

    def gated(*args):
        assert gate.wait(SECONDS)
        return wait(*args)

    machine.library._functions["cuEventSynchronize"] = gated
    return gate


def wait_until(condition):
    for _ in range(SECONDS * 1000):
        if condition():
            return True
        threading.Event().wait(0.001)
    return False


def test_work_on_gpus_is_issued_before_it_ends(monkeypatch):
    """Kernels and copies of two calls up to the CPU's step are in streams while nothing has ended."""
    machine = Machine(monkeypatch, THERE_AND_BACK)
    gate = hold_ends(machine)
    inputs = [numbers() for _ in range(2)]
    fences = [machine.submit(*arrays) for arrays in inputs]
    copies = ["to the GPU"] * 2 + [(100, 101)] * 2 + ["to the host"] * 2
    assert wait_until(lambda: sorted(str(kind) for kind, _ in machine.cuda.copies) == sorted(map(str, copies)))
    assert not any(fence.done() for fence in fences)
    gate.set()
    for fence, arrays in zip(fences, inputs, strict=True):
        machine.check(fence, *arrays)


def test_copies_have_streams_of_their_own_and_kernels_one(monkeypatch):
    machine, used = Machine(monkeypatch, THERE_AND_BACK), {}
    push = machine.cuda._push

    def watched(stream, work):
        used.setdefault(stream, set()).add(work.__qualname__.split(".")[0])
        push(stream, work)

    machine.cuda._push = watched
    for _ in range(2):
        arrays = numbers()
        machine.check(machine.submit(*arrays), *arrays)
    # To a GPU, to the other, to the host.
    kernels = [kinds for kinds in used.values() if "Machine" in kinds]
    copies = [kinds for kinds in used.values() if "FakeCuda" in kinds and "Machine" not in kinds]
    assert len(kernels) == 2 and len(copies) == 3


def test_results_that_were_copied_to_a_gpu_have_memory_of_their_own(monkeypatch):
    """Whoever takes such a result may have the GPU work on it when the last reference goes."""
    machine = Machine(monkeypatch, schedule_of([Step(GPU_1, (1,), (2,), source=GPU)], (2,)))
    allocations = []
    monkeypatch.setattr(stream_queue, "empty", lambda *args: allocations.append(args) or machine.fresh(*args))
    for count in (1, 2):
        arrays = numbers()
        machine.check(machine.submit(*arrays), *arrays)
        assert allocations == [((LENGTH,), "int64", DEVICES[GPU_1])] * count


def test_a_kernel_that_fails_after_it_launched(monkeypatch):
    machine = Machine(monkeypatch, THERE_AND_BACK, 5)
    arrays = numbers()
    machine.check(machine.submit(*arrays), *arrays)
    machine.failing.add(3)
    fences = [machine.submit(*numbers()) for _ in range(4)]
    for fence in fences:
        with pytest.raises(HeteroError, match="'main', step 'again' failed: ValueError: kernel of bad luck"):
            fence.result(SECONDS)
    machine.failing.clear()
    for _ in range(5):
        arrays = numbers()
        machine.check(machine.submit(*arrays), *arrays)


def test_a_failed_call_keeps_its_memory_until_gpus_are_done_with_it(monkeypatch):
    steps = [Step(GPU, (1,), (2,), "on_gpu"), Step(GPU_1, (2,), (3,), source=GPU), Step(CPU, (0,), (4,), "on_cpu")]
    machine = Machine(monkeypatch, schedule_of(steps, (3, 4)))
    gate = hold_ends(machine)
    machine.failing.add(2)
    machine.holding = threading.Event()
    fence = machine.submit(*numbers())
    assert wait_until(lambda: machine.cuda.copies)
    machine.holding.set()
    assert wait_until(lambda: machine.failed)
    with pytest.raises(TimeoutError):
        fence.result(0.05)
    gate.set()
    with pytest.raises(HeteroError, match="bad luck"):
        fence.result(SECONDS)


def test_a_gpu_that_fails(monkeypatch):
    """An error that the driver reports when work ends reaches every call under way, by the function's name."""
    machine = Machine(monkeypatch, THERE_AND_BACK)
    gate = hold_ends(machine)
    fences = [machine.submit(*numbers()) for _ in range(3)]
    machine.cuda.failing["cuEventSynchronize"] = LOST
    gate.set()
    for fence in fences:
        with pytest.raises(HeteroError, match=r"'main', .* failed: CudaError: .*CUDA_ERROR_LAUNCH_FAILED"):
            fence.result(SECONDS)
    assert machine.calls.wait(SECONDS)


def test_a_stream_that_takes_no_work(monkeypatch):
    machine = Machine(monkeypatch, THERE_AND_BACK)
    machine.cuda.failing["cuEventRecord"] = LOST
    with pytest.raises(HeteroError, match="a transfer failed: CudaError: cuEventRecord failed"):
        machine.submit(*numbers()).result(SECONDS)
    machine.cuda.failing.clear()
    arrays = numbers()
    machine.check(machine.submit(*arrays), *arrays)


def test_calls_can_be_cancelled_until_they_begin(monkeypatch):
    machine = Machine(monkeypatch, THERE_AND_BACK, max_in_flight=8)
    gate = threading.Event()
    inputs = [numbers() for _ in range(4)]
    first = machine.submit(*inputs[0])
    machine.check(first, *inputs[0])
    machine.holding = gate  # the first step of all later calls
    fences = [machine.submit(*arrays) for arrays in inputs]
    assert fences[2].cancel()
    gate.set()
    for fence, arrays in zip(fences, inputs, strict=True):
        if fence is fences[2]:
            with pytest.raises(CancelledError):
                fence.result(SECONDS)
        else:
            machine.check(fence, *arrays)
    assert machine.calls.wait(SECONDS)


def test_callers_streams_come_first(monkeypatch):
    """An argument that the caller's own stream has yet to write."""
    machine = Machine(monkeypatch, THERE_AND_BACK)
    arrays = numbers()
    machine.check(machine.submit(*arrays), *arrays)
    inputs = [machine.value(CPU, arrays[0]), machine.value(GPU, np.zeros(LENGTH))]
    address = inputs[1].data_ptr()
    with tvm_ffi.use_raw_stream(DEVICES[GPU], 77):
        machine.cuda.streams[77] = [lambda: np.copyto(memory_of(address), arrays[1])]
        fence = machine.submit(inputs=inputs)
    machine.check(fence, *arrays)
    assert not machine.cuda.streams[77]


def test_memory_comes_back(monkeypatch):
    machine = Machine(monkeypatch, THERE_AND_BACK)
    arrays = numbers()
    machine.check(machine.submit(*arrays), *arrays)
    for _ in range(3):
        machine.check(machine.submit(*arrays), *arrays)
    before = len(machine.cuda.memory), len(machine.cuda.pinned), len(machine.cuda.events)
    for _ in range(20):
        machine.check(machine.submit(*arrays), *arrays)
    assert machine.calls.wait(SECONDS)
    assert wait_until(lambda: (len(machine.cuda.memory), len(machine.cuda.pinned), len(machine.cuda.events)) <= before)
