"""Models of the command line: ONNX files are imported and compiled, libraries are loaded."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..artifact.file_hints import folder_kind
from ..artifact.regular_files import open_regular
from ..display.console import console
from ..system import LIBRARY_SUFFIXES
from .placement_options import PlacementOptions

if TYPE_CHECKING:
    from tvm import IRModule

    from ..vm import Executable


@dataclass(frozen=True)
class Model:
    """An executable and its source.

    Attributes
    ----------
    executable : Executable
        Executable, loaded or compiled.
    onnx : Path or None
        ONNX file that it was compiled from, if known.
    seconds : dict of str to float
        Times of ``import`` and ``compile``, or of ``load``.
    """

    executable: Executable
    onnx: Path | None
    seconds: dict[str, float] = field(default_factory=dict)


def is_onnx(path: Path) -> bool:
    """Return whether a path names an ONNX file rather than a compiled library."""
    if path.suffix.lower() in (*LIBRARY_SUFFIXES, ".tar"):
        return False
    try:
        with open_regular(path)[0] as file:
            return file.read(4) != b"\x7fELF"  # a library may have any name
    except OSError:
        return True


def obtain(
    path: Path,  # ONNX file or library
    placing: PlacementOptions,
    cache: bool,  # whether to use the compile cache
    key: bytes | None = None,  # key that a library must be signed with
    # As for `rh.compile`.
    checks: str = "default",
    accuracy: str = "default",
) -> Model:
    """Compile an ONNX file, or load an exported library.

    Raises HeteroError if the model cannot be imported, placed, compiled or loaded, and click.UsageError if options of
    placement or compilation are given for a library.
    """
    if is_onnx(path):
        return compile_onnx(path, placing, cache, checks, accuracy)
    refuse_compiled(path, checks=checks, accuracy=accuracy)
    return load_library(path, placing, key)


def has_weights(path: Path) -> bool:
    """Return whether a path names a language model that is not compiled: a GGUF file or a folder of Hugging Face."""
    return path.suffix.lower() == ".gguf" or folder_kind(path) == "hub"


def refuse_language_model(path: Path) -> None:
    """Raise UsageError, before it is compiled, for a language model that is to be called as one function."""
    if has_weights(path):
        raise click.UsageError(
            f"{path.name} is a language model, which chat and serve run; explain {path.name} token --profile times a "
            "decode step"
        )


def is_saved(path: Path) -> bool:
    """Return whether a path names the folder of a compiled language model."""
    return path.is_dir() and not has_weights(path)


def placed_module(path: Path, placing: PlacementOptions) -> IRModule:
    """Import and place an ONNX or a GGUF file, or a folder of Hugging Face.

    Raises HeteroError if the model cannot be imported or placed, and click.UsageError if an option does not apply to a
    GGUF file.
    """
    import relax_hetero as rh

    if not has_weights(path):
        return rh.from_onnx(str(path), **placing.import_options(input_names(path)))
    from ..transform.record.donated import with_donated

    module = rh.from_gguf(path, **gguf_options(path, placing))
    # Donate the pages, as `llm.load` does.
    functions = {gvar.name_hint: func.attrs.get("input_names", ()) for gvar, func in module.functions_items()}
    pages = {n: [i for i in inputs if i.startswith("pages_")] for n, inputs in functions.items() if inputs}
    return with_donated(module, pages)


def gguf_options(path: Path, placing: PlacementOptions) -> dict[str, Any]:
    """Keyword arguments for ``rh.from_gguf``. Raises click.UsageError if an option does not apply to a GGUF file."""
    options = placing.import_options()
    for name in ("shapes", "limits", "objective"):
        if options.pop(name, None) is not None:
            raise click.UsageError(f"{path.name} is a language model of fixed sizes: {name} go with an ONNX file")
    return options


def compile_onnx(
    path: Path, placing: PlacementOptions, cache: bool, checks: str = "default", accuracy: str = "default"
) -> Model:
    """Import, place and compile an ONNX file (or use the compile cache), with a spinner on stderr."""
    import relax_hetero as rh

    with console(stderr=True).status(f"Importing {path.name}") as status:
        start = time.perf_counter()
        module = placed_module(path, placing)
        middle = time.perf_counter()
        status.update(f"Compiling {path.name}")
        executable = rh.compile(
            module,
            cache=cache,
            checks=checks,
            accuracy=accuracy,
            optional=placing.optional or None,
            progress=lambda step, done, total: status.update(f"Compiling {path.name}: {done} of {total} {step}"),
        )
        seconds = {"import": middle - start, "compile": time.perf_counter() - middle}
    return Model(executable, path, seconds)


def refuse_compiled(library: Path, **options: str) -> None:
    """Raise UsageError if an option of compilation does not have its default."""
    for name, value in options.items():
        if value != "default":
            raise click.UsageError(f"{library.name} is compiled already: --{name} {value} goes with an ONNX file")


def load_library(path: Path, placing: PlacementOptions, key: bytes | None = None) -> Model:
    """Load an exported library; with a key, it must be signed with it."""
    if placing.is_given:
        raise click.UsageError(
            f"{path.name} is compiled and so placed already: --vdevice, --optional, --place and --place-auto go with "
            "an ONNX file"
        )
    import relax_hetero as rh

    start = time.perf_counter()
    executable = rh.load(str(path), key=key)
    return Model(executable, None, {"load": time.perf_counter() - start})


def input_names(path: Path) -> list[str]:
    """Names of an ONNX file's inputs; external weights are not read."""
    from ..frontend.onnx.onnx_model import read_model

    return [value.name for value in read_model(path)[0].graph.input]
