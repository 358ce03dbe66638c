"""One process of `gpu_models.py`: a model on a GPU, cut over a CPU and the GPU, compared with a CPU, and timed.

Arguments come as JSON in ``argv``. Each result is a line of JSON on the original standard output, and everything that
libraries print goes to standard error. Then the process waits for a line on standard input and times the
model, so that models are compiled side by side and timed one after the other.
"""

from __future__ import annotations

import glob
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

BENCH = Path(__file__).resolve().parents[1]
CALLS = 20
"""Timed calls of one round."""
ROUNDS = 3


@dataclass(frozen=True)
class Job:
    """The work of a process on one model.

    Attributes
    ----------
    name, file : str
        Name of the model, and its ONNX file or skeleton.
    precision : str
        Precision of float products: float32, float16, bfloat16, tfloat32.
    gpu : str
        Target of the GPU: a kind, or JSON.
    reference : str
        Reference of the results: "onnxruntime", or "ours" on the native CPU.
    cuts : int
        Number of parts of a second run, alternating between the GPU and the other device; 0 for none.
    other : str
        Target of the other device: a kind, or JSON; "cuda:1" is a second GPU.
    build_only : bool
        Compile and run nothing.
    peer : bool
        Also time PyTorch's eager ops, captured as a CUDA graph.
    compiled : str
        Also time ``torch.compile`` in this mode ("default", "max-autotune-no-cudagraphs"), captured likewise.
    batch : int
        Number of images or sentences.
    slowest : int
        Number of slowest kernels to report.
    """

    name: str
    file: str
    precision: str = "float32"
    gpu: str = "cuda"
    reference: str = "onnxruntime"
    cuts: int = 6
    other: str = "llvm"
    build_only: bool = False
    peer: bool = False
    compiled: str = ""
    batch: int = 1
    slowest: int = 0

    def command(self) -> list[str]:
        """The command line that runs it."""
        return [sys.executable, "-m", "gpu_bench.model_process", json.dumps(asdict(self))]

    def environment(self) -> dict[str, str]:
        """The environment of its process."""
        path = os.pathsep.join([str(BENCH), *filter(None, [os.environ.get("PYTHONPATH", "")])])
        few = {"TVM_NUM_THREADS": "2", "TVM_BIND_THREADS": "0", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        return {**few, **os.environ, "PYTHONPATH": path}

    @property
    def about(self) -> dict[str, Any]:
        """The fields that identify the job in every line."""
        return {"model": self.name, "precision": self.precision, "batch": self.batch}

    @property
    def target(self) -> Any:
        """The GPU as `rh.from_onnx` takes it."""
        return json.loads(self.gpu) if self.gpu.startswith("{") else self.gpu


class Work:
    """The steps of a job; each returns the fields of its line."""

    def __init__(self, job: Job) -> None:
        from model_zoo import random_arrays
        from model_zoo.batches import with_batch
        from model_zoo.skeleton import SUFFIX, expanded

        self.job = job
        file = Path(job.file)
        self.model = expanded(file) if file.name.endswith(SUFFIX) else onnx.load(str(file))
        if job.batch > 1:
            self.model = with_batch(self.model, job.batch)
        for index, node in enumerate(self.model.graph.node):
            node.name = node.name or f"{node.op_type}_{index}"
        self.inputs = random_arrays(self.model.graph, {}, 0)
        self.wanted: list[np.ndarray] = []
        self.machine: Any = None
        self.by_kernel: Any = None
        self.peers: dict[str, Any] = {}

    def reference(self) -> dict[str, Any]:
        """Results on the CPU, in float32."""
        begin = time.perf_counter()
        if self.job.reference == "ours":
            self.wanted = self._results(self._compiled(["llvm"], None, "float32"))
        else:
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 2
            content = self.model.SerializeToString()
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            self.wanted = session.run(None, self.inputs)
        return {"seconds": time.perf_counter() - begin}

    def gpu(self) -> dict[str, Any]:
        """The whole model on the GPU."""
        import relax_hetero as rh

        begin = time.perf_counter()
        executable = self._compiled([self.job.target], None, self.job.precision)
        fields = {"compile_seconds": time.perf_counter() - begin}
        if not self.job.build_only:
            self.machine = rh.vm.VirtualMachine(executable)
            fields["error"] = self._error(self._run(self.machine))
            fields["error_of_a_second_call"] = self._error(self._run(self.machine))
        if self.job.slowest and not self.job.build_only:  # without CUDA graphs, which are measured as a whole
            plain = self._compiled([self.job.target], None, self.job.precision, command_buffers=False)
            self.by_kernel = rh.vm.VirtualMachine(plain)
            fields["error_by_kernel"] = self._error(self._run(self.by_kernel))
        return fields

    def cut(self) -> dict[str, Any]:
        """The model in parts, alternating between the GPU and the other device; both must have ops."""
        names = [node.name for node in self.model.graph.node]
        size = max(1, -(-len(names) // self.job.cuts))
        # A second CPU target if a CPU stands for the GPU: two devices need two targets.
        gpu = {"kind": "llvm", "mcpu": "x86-64-v3"} if self.job.gpu == "llvm" else self.job.target
        placement = {glob.escape(name): f"vdevice:{1 - index // size % 2}" for index, name in enumerate(names)}
        begin = time.perf_counter()
        executable = self._compiled([self.job.other, gpu], placement, self.job.precision)
        fields: dict[str, Any] = {"compile_seconds": time.perf_counter() - begin}
        devices_of_ops = [entry["device_index"] for entry in executable.metadata.placement if entry["kind"] == "op"]
        fields["ops"] = [devices_of_ops.count(0), devices_of_ops.count(1)]
        if not self.job.build_only:
            fields["error"] = self._error(self._results(executable))
        return fields

    def times(self) -> dict[str, Any]:
        """Milliseconds of a call from numpy to numpy, and of consecutive calls on tensors of the GPU."""
        import tvm

        main, kind = self.machine["main"], self.machine.executable.devices[0].kind
        gpu = tvm.cpu() if kind == "llvm" else tvm.runtime.device(kind, 0)
        tensors = [tvm.runtime.tensor(array, gpu) for array in self.inputs.values()]
        fields = {
            "call_ms": _median_ms(lambda: self._run(self.machine), lambda: None),
            "device_ms": _median_ms(lambda: main(*tensors), gpu.sync),
        }
        return {
            **fields,
            "graphs": len(self.machine.graphs),
            "kernels": len(self.machine.executable.metadata.dispatches),
        }

    def slowest(self) -> dict[str, Any]:
        """The slowest kernels, each measured alone and including its launch, and the device's peaks.

        Peaks are the rates of the library's own large products and sums on the device, by element type.
        """
        from dataclasses import asdict

        from model_bench.dispatches import dispatches_of

        import relax_hetero as rh
        from relax_hetero.frontend.auto.measure_devices import figures_of

        target = self.job.target
        figures = figures_of([rh.VDevice(rh.native(target) if isinstance(target, str) else target)])
        device = figures.devices[0] if figures else None
        dispatches = dispatches_of(self.by_kernel, list(self.inputs.values()))[: self.job.slowest]
        return {
            "dispatches": [asdict(dispatch) for dispatch in dispatches],
            "peaks": device.products if device else {},
            "bandwidth": device.bandwidth if device else 0.0,
        }

    def torch(self) -> dict[str, Any]:
        """PyTorch's eager ops of the same nodes, traced and captured as a CUDA graph."""
        import torch

        runner, operands = self._runner()
        with torch.inference_mode():
            traced = torch.jit.freeze(torch.jit.trace(runner, operands, check_trace=False))
            return self._captured("torch", traced, operands)

    def torch_compiled(self) -> dict[str, Any]:
        """The same nodes as one graph of ``torch.compile``, captured as a CUDA graph."""
        import torch
        from model_peers.torch_graph import graph_of

        runner, operands = self._runner()
        begin = time.perf_counter()
        with torch.inference_mode():
            graph = graph_of(runner, operands)
            compiled = torch.compile(graph, mode=self.job.compiled, dynamic=False, fullgraph=True)
            fields = self._captured("torch.compile", compiled, operands)
        return {**fields, "seconds": time.perf_counter() - begin}

    def peer_times(self, name: str) -> dict[str, Any]:
        """Milliseconds of a captured program, launched as often as ours."""
        import torch

        graph, fields, *_ = self.peers[name]
        return {**fields, "device_ms": _median_ms(graph.replay, torch.cuda.synchronize)}

    def _runner(self) -> tuple[Any, list[Any]]:
        """The nodes as a PyTorch module on the GPU, and its operands."""
        import torch
        from model_peers.torch_graph import Runner

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.job.precision == "tfloat32"
        torch.backends.cudnn.benchmark = True  # the fastest of its algorithms
        lower = getattr(torch, self.job.precision, torch.float32)
        operands = [torch.from_numpy(array).cuda() for array in self.inputs.values()]
        operands = [value.to(lower) if value.is_floating_point() else value for value in operands]
        return Runner(self.model, lower).eval().cuda(), operands

    def _captured(self, name: str, program: Callable[..., Any], operands: Sequence[Any]) -> dict[str, Any]:
        """Store a PyTorch program as a CUDA graph under the peer's name; the error of its results."""
        import torch

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                program(*operands)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            results = program(*operands)
        graph.replay()
        torch.cuda.synchronize()
        results = results if isinstance(results, tuple) else (results,)
        fields = {"error": self._error([result.float().cpu().numpy() for result in results])}
        # A CUDA graph reads operands and weights by address: neither may be freed.
        self.peers[name] = graph, fields, program, operands
        return fields

    def _compiled(
        self, devices: Sequence[Any], placement: dict[str, str] | None, precision: str, command_buffers: bool = True
    ) -> Any:
        import relax_hetero as rh

        module = rh.from_onnx(self.model, vdevices=list(devices), placement=placement)
        if precision != "float32":
            module = rh.transform.ToMixedPrecision(precision)(module)
        return rh.compile(module, cache=False, command_buffers=command_buffers)

    def _results(self, executable: Any) -> list[np.ndarray]:
        import relax_hetero as rh

        return self._run(rh.vm.VirtualMachine(executable))

    def _run(self, machine: Any) -> list[np.ndarray]:
        result = machine["main"](**self.inputs)
        return [tensor.numpy() for tensor in (result if isinstance(result, tuple) else (result,))]

    def _error(self, results: Sequence[np.ndarray]) -> float:
        """The largest difference of any output over that output's largest number; infinity for other shapes or NaN."""
        worst = 0.0
        for ours, expected in zip(results, self.wanted, strict=True):
            if ours.shape != expected.shape or not np.array_equal(np.isfinite(ours), np.isfinite(expected)):
                return float("inf")
            finite = np.isfinite(expected)
            if finite.any():
                difference = np.abs(ours[finite].astype("float64") - expected[finite].astype("float64")).max()
                worst = max(worst, float(difference / max(np.abs(expected[finite]).max(), 1e-30)))
        return worst


def _median_ms(call: Callable[[], object], wait: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    wait()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        wait()
        times.append((time.perf_counter() - begin) / CALLS * 1e3)
    return statistics.median(times)


def main(job: Job) -> None:
    """Run the steps of a job; a step that fails writes a line with its failure, and the other steps continue."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def step(name: str, work: Callable[[], dict[str, Any]]) -> bool:
        answers.write(json.dumps({"begins": name}) + "\n")
        try:
            fields = work()
        except Exception as error:  # every failure is a result
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"
            fields = {"failure": f"{type(error).__name__}: {error}"[:3000], "where": where}
        answers.write(json.dumps({"step": name, **job.about, **fields}) + "\n")
        return "failure" not in fields

    work = Work(job)
    if job.build_only or step("reference", work.reference):
        step("gpu", work.gpu)
        if job.cuts:
            step("cut", work.cut)
        if work.machine is not None and job.peer:
            step("torch", work.torch)
        if work.machine is not None and job.compiled:
            step("torch.compile", work.torch_compiled)
    answers.write(json.dumps({"waits": True}) + "\n")
    if sys.stdin.readline().strip() != "time" or work.machine is None:
        return
    if step("times", work.times) and job.slowest:
        step("slowest", work.slowest)
    for name in work.peers:
        step(name, lambda name=name: work.peer_times(name))


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
