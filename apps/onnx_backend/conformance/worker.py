"""A process that runs cases one by one: it reads names from stdin, and writes a JSON line per outcome to stdout."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import warnings

from .backends import CPU_CONFIGURATIONS, GPU_CONFIGURATIONS
from .outcome import RAISED, run_case

# After some errors CUDA refuses all work of the process, and later cases would fail, too.
_LOST_GPU = re.compile("CUDA|illegal memory access|unspecified launch failure")


def main(configuration: str, memory_bytes: int) -> None:
    """Serve until stdin closes, or until a GPU is lost. Output of libraries goes to stderr, not to the outcomes.

    The address space is not limited if a GPU is used: CUDA reserves more of it than the machine has memory.
    """
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if configuration in CPU_CONFIGURATIONS:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        outcome = run_case(line.strip(), configuration)
        results.write(json.dumps(outcome.to_json()) + "\n")
        if outcome.status == RAISED and configuration in GPU_CONFIGURATIONS and _LOST_GPU.search(outcome.detail):
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
