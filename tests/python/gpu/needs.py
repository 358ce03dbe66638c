"""Says what `make gpu` lacks on this machine: packages by name, or a GPU. Ends with 1 where something is missing."""

from __future__ import annotations

import importlib.util
import sys

# Modules, and the packages that have them.
NEEDED = {
    "tvm": "apache-tvm==0.27.0.post1", "numpy": "numpy", "onnx": "onnx", "onnxruntime": "onnxruntime", "click": "click",
    "rich": "rich", "lazy_loader": "lazy_loader", "packaging": "packaging", "pytest": "pytest", "xdist": "pytest-xdist",
    "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis", "gguf": "gguf", "httpx": "httpx",
    "jinja2": "jinja2", "cuda.bindings": "cuda-bindings",
}  # fmt: skip


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


missing = [package for module, package in NEEDED.items() if not has(module)]
if missing:
    sys.exit(f"make gpu needs, for {sys.executable}: {' '.join(missing)}")

import tvm  # noqa: E402

if not tvm.cuda(0).exist:
    sys.exit("make gpu needs an NVIDIA GPU and its driver; TVM finds none")
print(f"{tvm.cuda(0).device_name}, compute capability {tvm.cuda(0).compute_version}")
