"""A process that runs cases one by one: names come in on stdin, a JSON line per outcome goes out on stdout."""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings

from .outcome import run_case


def main(configuration: str, memory_bytes: int) -> None:
    """Serve until stdin closes. Whatever the libraries print goes to stderr, never among the outcomes."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        outcome = run_case(line.strip(), configuration)
        results.write(json.dumps(outcome.to_json()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
