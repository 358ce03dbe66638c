"""Description of GPUs by the operating system, without TVM and at once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_GPUS = Path("/proc/driver/nvidia/gpus")


def gpus_of_system() -> int:
    """How many NVIDIA GPUs the system's driver knows, whatever TVM can do with them."""
    try:
        return len(list(_GPUS.iterdir()))
    except OSError:
        return 0


def device_texts(suffix: str = "") -> list[str]:
    """The devices of this machine as ``--vdevice`` takes them; the CPU's name has `suffix`."""
    return [f"llvm{suffix}", *(f"cuda:{index}" for index in range(gpus_of_system()))]


def driver() -> str:
    """The version of NVIDIA's driver; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
