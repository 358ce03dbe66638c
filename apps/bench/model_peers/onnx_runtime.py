"""ONNX Runtime: its CPU provider with all graph optimizations, inputs and outputs bound once."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from . import Inputs, Session, Setting


def session(model: str, threads: int) -> ort.InferenceSession:
    """A session of the CPU provider."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """Make a session, which reads and optimizes the file and packs its weights."""
    setting.only_float32()
    running = session(model, setting.threads)
    binding = running.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in running.get_outputs():
        binding.bind_output(output.name)

    def results() -> list[np.ndarray]:
        return list(binding.copy_outputs_to_cpu())

    return Session(lambda values=values: running.run_with_iobinding(binding), results)
