"""Models of the command line: an ONNX file is imported and compiled, a library is loaded."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..artifact.regular_files import open_regular
from ..display.console import console
from .placing import Placing

if TYPE_CHECKING:
    from tvm import IRModule

    from ..vm import Executable


@dataclass(frozen=True)
class Model:
    """An executable and where it came from.

    Attributes
    ----------
    executable : Executable
        Loaded, or compiled in this process.
    onnx : Path or None
        The ONNX file it was compiled from, if that is known.
    seconds : dict of str to float
        How long each step took: ``import`` and ``compile``, or ``load``.
    """

    executable: Executable
    onnx: Path | None
    seconds: dict[str, float] = field(default_factory=dict)


def is_onnx(path: Path) -> bool:
    """Return whether a path names an ONNX file rather than a compiled library."""
    if path.suffix.lower() in (".so", ".dylib", ".dll", ".tar"):
        return False
    try:
        with open_regular(path)[0] as file:
            return file.read(4) != b"\x7fELF"  # an executable may have any name
    except OSError:
        return True


def obtain(
    path: Path,
    placing: Placing,
    cache: bool,
    key: bytes | None = None,
    checks: str = "default",
    accuracy: str = "default",
) -> Model:
    """Compile an ONNX file, or load an exported library.

    Parameters
    ----------
    path, placing
    cache : bool
        Whether compiled models are kept and found again.
    key : bytes, optional
        Key that a library has to be signed with.
    checks, accuracy : str
        As `rh.compile` takes them.

    Raises
    ------
    HeteroError
        If the model cannot be imported, placed, compiled or loaded.
    click.UsageError
        If options of placing or compiling are given for a library, which is placed and compiled already.
    """
    if is_onnx(path):
        return compile_onnx(path, placing, cache, checks, accuracy)
    refuse_compiled(path, checks=checks, accuracy=accuracy)
    return load_library(path, placing, key)


def is_gguf(path: Path) -> bool:
    """Return whether a path names a language model's GGUF file."""
    return path.suffix.lower() == ".gguf"


def placed_module(path: Path, placing: Placing) -> IRModule:
    """Import and place an ONNX or a GGUF file.

    Raises
    ------
    HeteroError
        If the model cannot be imported or placed.
    click.UsageError
        If an option is given that a GGUF file does not take.
    """
    import relax_hetero as rh

    if not is_gguf(path):
        return rh.from_onnx(str(path), **placing.import_options(input_names(path)))
    from ..transform.record.donated import with_donated

    module = rh.from_gguf(path, **gguf_options(path, placing))
    # The cache is written in place, as `llm.load` has it.
    functions = {gvar.name_hint: func for gvar, func in module.functions_items()}
    pages = {n: [p.name for p in func.params if p.name.startswith("pages_")] for n, func in functions.items()}
    return with_donated(module, pages)


def gguf_options(path: Path, placing: Placing) -> dict[str, Any]:
    """The options of ``rh.from_gguf``.

    Raises
    ------
    click.UsageError
        If an option is given that a GGUF file does not take.
    """
    options = placing.import_options()
    for name in ("shapes", "limits", "objective"):
        if options.pop(name, None) is not None:
            raise click.UsageError(f"{path.name} is a language model of fixed sizes: {name} go with an ONNX file")
    return options


def compile_onnx(
    path: Path, placing: Placing, cache: bool, checks: str = "default", accuracy: str = "default"
) -> Model:
    """Import, place and compile an ONNX file, or find it compiled; with a spinner on stderr."""
    import relax_hetero as rh

    with console(stderr=True).status(f"Importing {path.name}") as status:
        start = time.perf_counter()
        module = placed_module(path, placing)
        imported = time.perf_counter()
        status.update(f"Compiling {path.name}")
        executable = rh.compile(
            module,
            cache=cache,
            checks=checks,
            accuracy=accuracy,
            optional=placing.optional or None,
            progress=lambda step, done, total: status.update(f"Compiling {path.name}: {done} of {total} {step}"),
        )
        seconds = {"import": imported - start, "compile": time.perf_counter() - imported}
    return Model(executable, path, seconds)


def refuse_compiled(library: Path, **options: str) -> None:
    """click.UsageError if an option that compiling goes by has a value other than its default."""
    for name, value in options.items():
        if value != "default":
            raise click.UsageError(f"{library.name} is compiled already: --{name} {value} goes with an ONNX file")


def load_library(path: Path, placing: Placing, key: bytes | None = None) -> Model:
    """Load an exported library, with a key only one that was signed with it."""
    if placing.given:
        raise click.UsageError(
            f"{path.name} is compiled and so placed already: --vdevice, --optional, --place and --place-auto go with "
            "an ONNX file"
        )
    import relax_hetero as rh

    start = time.perf_counter()
    executable = rh.load(str(path), key=key)
    return Model(executable, None, {"load": time.perf_counter() - start})


def input_names(path: Path) -> list[str]:
    """The names of an ONNX file's inputs; weights that lie in files of their own are not read."""
    from ..frontend.onnx.model import read_model

    return [value.name for value in read_model(path)[0].graph.input]
