"""Run ONNX's backend suite: `python apps/onnx_backend/run.py --help`."""

from __future__ import annotations

from conformance.cli import main

if __name__ == "__main__":
    main()
