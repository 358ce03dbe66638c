"""Hints in errors about arguments of a wrong kind: the kind of the value, and the function that accepts it.

Kinds are recognized by names of classes, first bytes of files and suffixes, without imports.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

# Kind -> description, and advice.
_KINDS = {
    "onnx": ("an ONNX model", "rh.from_onnx imports it"),
    "gguf": ("a GGUF file", "rh.from_gguf imports it, and rh.llm.load makes a language model of it"),
    "torch": ("a PyTorch module", "rh.from_torch imports it"),
    "state": (
        "a file of PyTorch",
        "load the module that it belongs to with PyTorch, and rh.from_torch imports that",
    ),
    "safetensors": (
        "weights without a model",
        "rh.llm.load reads the folder of a language model, with its config.json; or load their module with PyTorch, "
        "and rh.from_torch imports that",
    ),
    "hub": (
        "a folder of Hugging Face",
        "rh.llm.load makes a language model of it; or load its module with transformers, and rh.from_torch imports "
        "that",
    ),
    "genai": ("a folder with an ONNX model", "rh.from_onnx and rh.llm.load read the model in it"),
    "saved": ("a saved language model", "rh.llm.load loads it"),
    "library": ("a shared library", "rh.load loads what Executable.export_library wrote"),
    "script": ("a Python file", "import it, and give the module (tvm.IRModule) that it defines"),
    "module": ("a module", "rh.compile makes an Executable of it"),
    "function": ("a function", 'tvm.IRModule({"main": function}) is a module of it'),
    "kernel": ("a kernel alone", "rh.compile takes a module whose Relax function calls it by call_tir"),
    "stock": ("code that stock TVM compiled", "rh.compile makes an Executable of the module that it came from"),
    "executable": ("", "rh.vm.VirtualMachine runs it"),
    "machine": ("", 'vm["main"](...) runs its function, vm.executable is what it runs'),
}
_READERS = {
    "rh.from_onnx": ("onnx",),
    "rh.from_gguf": ("gguf", "hub"),
    "rh.llm.load": ("gguf", "saved", "hub", "genai"),
    "rh.load": ("library",),
    "rh.from_torch": ("torch",),
}
_CLASSES = {
    ("onnx", "ModelProto"): "onnx",
    ("onnx", "GraphProto"): "onnx",
    ("torch", "Module"): "torch",
    ("torch", "ExportedProgram"): "torch",
    ("tvm", "IRModule"): "module",
    ("tvm", "Function"): "function",
    ("tvm", "PrimFunc"): "kernel",
    ("tvm", "VMExecutable"): "stock",
    ("tvm", "Executable"): "stock",
    ("tvm", "Module"): "stock",
    ("relax_hetero", "Executable"): "executable",
    ("relax_hetero", "VirtualMachine"): "machine",
    ("relax_hetero", "GgufFile"): "gguf",
}
_ENDINGS = {
    ".onnx": "onnx", ".ort": "onnx", ".gguf": "gguf", ".so": "library", ".dylib": "library", ".dll": "library",
    ".pt": "state", ".pth": "state", ".pt2": "state", ".bin": "state", ".ckpt": "state", ".safetensors": "safetensors",
    ".py": "script",
}  # fmt: skip
_MAX_CHARACTERS = 200


def describe_value(value: Any, reader: str = "") -> str:
    """A description of a value with advice: ``"found 'm.onnx' (str), an ONNX model: rh.from_onnx imports it"``.

    `value`: argument of a wrong kind. `reader`: function that received it, such as "rh.load", which is not suggested.
    """
    is_path = isinstance(value, (str, os.PathLike))
    text = f"found {_short(value)} ({type(value).__name__})" if is_path else f"found {type(value).__name__}"
    return f"{text}{hint_of(value, reader)}"


def hint_of(value: Any, reader: str = "") -> str:
    """The part of the description about a value's kind; empty if the kind is unknown or `reader` accepts it."""
    kind = _kind_of_path(value) if isinstance(value, (str, os.PathLike)) else _kind_of_object(value)
    if kind is None or kind in _READERS.get(reader, ()):
        return ""
    what, takes = _KINDS[kind]
    return f", {what}: {takes}" if what else f": {takes}"


def near_file(path: str | os.PathLike[str]) -> str:
    """End of an error message about a missing file: the most similar name in its folder as a question, or empty."""
    missing = Path(path)
    try:
        names = [] if missing.exists() else os.listdir(missing.parent)
    except (OSError, ValueError):
        return ""
    close = difflib.get_close_matches(missing.name, names, n=1, cutoff=0.75)
    return f"; did you mean {str(missing.with_name(close[0]))!r}?" if close else ""


def _short(value: object) -> str:
    """The text of a value, shortened."""
    text = repr(os.fspath(value)) if isinstance(value, os.PathLike) else repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS // 2]} … {text[-_MAX_CHARACTERS // 4 :]}"


def _kind_of_object(value: object) -> str | None:
    for base in type(value).__mro__:
        kind = _CLASSES.get((base.__module__.partition(".")[0], base.__name__))
        if kind is not None:
            return kind
    return None


def _kind_of_path(path: str | os.PathLike[str]) -> str | None:
    try:
        file = Path(path)
        if file.is_dir():
            return folder_kind(file)
        begin = b""
        if file.is_file():
            with file.open("rb") as opened:
                begin = opened.read(16)
    except (OSError, ValueError, TypeError):
        return None
    if begin.startswith(b"GGUF"):
        return "gguf"
    if begin.startswith((b"\x7fELF", b"\xcf\xfa\xed\xfe")):
        return "library"
    if begin[8:10] == b'{"':
        return "safetensors"
    return _ENDINGS.get(file.suffix.lower())


def folder_kind(path: str | os.PathLike[str]) -> str | None:
    """Kind of a folder: "saved" by `rh.llm.save`, "genai" (an ONNX model), "hub" (of Hugging Face) or None."""
    try:
        names = {entry.name for entry in Path(path).iterdir()}
    except (OSError, ValueError, TypeError):
        return None
    for kind, ends in _FOLDER_FILES:
        if names.intersection(ends) or any(Path(name).suffix in ends for name in names):
            return kind
    return None


_FOLDER_FILES = (
    ("saved", ("model.json",)),
    ("genai", ("genai_config.json",)),
    ("hub", (".safetensors",)),
    ("genai", (".onnx",)),
    ("hub", ("config.json",)),
)
"""Kinds of folders, and names or suffixes of their files; the first kind that fits counts."""
NO_LANGUAGE_MODEL = (
    "does not hold a language model; expected a folder with config.json and *.safetensors (Hugging Face), with an ONNX "
    "decoder, or with model.json (rh.llm.save)"
)
"""Error of a folder that has none of them, after its name."""
