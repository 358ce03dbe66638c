"""The machine that this process runs on, for reports with times."""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import tvm


def describe_machine() -> dict[str, Any]:
    """The machine that this process runs on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": _cpu_name(), "cores": cores, "gpus": _gpu_names()}


def _cpu_name() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        facts = []
    named = (line.partition(":")[2].strip() for line in facts if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    counted: Counter[str] = Counter()
    index = 0
    while (device := tvm.cuda(index)).exist:
        counted[str(device.device_name)] += 1
        index += 1
    return [name for name, count in counted.items() for _ in range(count)]
