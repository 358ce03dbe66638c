"""IREE: its ONNX importer, compiled for this CPU with data tiling and micro-kernels, weights inside the module."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import iree.compiler
import iree.runtime
import numpy as np

from . import Inputs, Session, Setting
from .ours import native_target

_OPSET = 17  # best supported by its importer; models of older opsets are converted to it
_FLAGS = ["--iree-opt-data-tiling", "--iree-llvmcpu-enable-ukernels=all"]
_FLAGS.append("--iree-opt-level=O3")
# Without it, convolutions of NCHW images take five times as long.
_CHANNELS_LAST = "builtin.module(util.func(iree-preprocessing-convert-conv-to-channels-last))"
_FLAGS.append(f"--iree-preprocessing-pass-pipeline={_CHANNELS_LAST}")


def compile_model(model: str, file: str, inputs: Inputs, setting: Setting) -> None:
    """Import to MLIR, compile to a module file."""
    setting.only_float32()
    with tempfile.TemporaryDirectory() as folder:
        text = str(Path(folder) / "model.mlir")
        command = [sys.executable, "-m", "iree.compiler.tools.import_onnx", model, "-o", text]
        importer = subprocess.run([*command, "--opset-version", str(_OPSET)], capture_output=True, text=True)
        if importer.returncode:
            raise RuntimeError(f"its importer failed: {importer.stderr.strip().splitlines()[-1]}")
        iree.compiler.compile_file(
            text,
            input_type="onnx",
            target_backends=["llvm-cpu"],
            extra_args=[*_FLAGS, *_cpu_flags(setting)],
            output_file=file,
        )


def _cpu_flags(setting: Setting) -> list[str]:
    """Flags for the CPU of this library's target."""
    target = native_target(setting)
    cpu = "host" if not setting.isa else target.attrs["mcpu"]
    features = ",".join(target.attrs.get("mattr", ())) if setting.isa else ""
    return [
        f"--iree-llvmcpu-target-cpu={cpu}",
        *([f"--iree-llvmcpu-target-cpu-features={features}"] if features else []),
    ]


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """The module's function on device buffers; it allocates its results."""
    if setting.threads > 1:  # flags apply to the process, before its first device
        iree.runtime.flags.parse_flags(f"--task_topology_group_count={setting.threads}")
    config = iree.runtime.Config("local-sync" if setting.threads == 1 else "local-task")
    context = iree.runtime.SystemContext(config=config)
    context.add_vm_module(iree.runtime.VmModule.mmap(context.instance, file))
    (module,) = (module for name, module in context.modules.items() if name != "hal")
    (name,) = (name for name in module.vm_module.function_names if not name.startswith("__") and "$" not in name)
    main = module[name]
    operands = [iree.runtime.asdevicearray(config.device, array) for array in inputs.values()]
    outputs: list[object] = []
    # The function does not keep its device and modules alive.
    alive = (config, context)

    def call(alive: object = alive) -> None:
        outputs[:] = [main(*operands)]

    def results() -> list[np.ndarray]:
        (output,) = outputs
        fields = output if isinstance(output, (tuple, list)) else [output]
        return [np.array(field.to_host()) for field in fields]

    return Session(call, results)
