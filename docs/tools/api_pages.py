"""The pages of docs/api/: each public name with its summary and the path of its docstring.

python docs/tools/api_pages.py --write    # writes them
python docs/tools/api_pages.py --check    # fails if they are out of date
"""

from __future__ import annotations

import argparse
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import relax_hetero as rh

API = Path(__file__).resolve().parents[1] / "api"
PAGES = {
    "relax_hetero": (
        "rh",
        "Names that most programs need: to import, compile and load a model, and the errors that are raised.",
    ),
    "transform": ("rh.transform", "Passes, each a `tvm.transform.Pass` that can stand in any `Sequential`."),
    "op": ("rh.op", "Relax operators of the library; TVMScript writes them `R.hetero.matmul` and so on."),
    "encoding": ("rh.encoding", "Encodings, layouts and the problems that kernels solve; the registry of resolvers."),
    "vm": ("rh.vm", "Executables and the virtual machine that runs them; TVM's runtime is enough for it."),
    "frontend": ("rh.frontend", "Import of models, and placement by a cost model."),
    "llm": ("rh.llm", "Language models: the engine, its cache, sampling, tokenizers."),
    "cluster": ("rh.cluster", "One module over several hosts."),
}
"""The name that users write and the first sentence of each page, in the order of the site."""


def page_of(package: str) -> str:
    """The page of one package."""
    title, sentence = PAGES[package]
    module: Any = rh if package == "relax_hetero" else getattr(__import__(f"relax_hetero.{package}"), package)
    names = [name for name in module.__all__ if not name.startswith("__")]
    entries = {name: entry_of(package, title, name, getattr(module, name)) for name in names}
    order = sorted(entries, key=lambda name: (name.lower(), name))
    after = [*PAGES, None][list(PAGES).index(package) + 1]
    more = f"[{PAGES[after][0]}]({after}.md)" if after else "[the command line](../reference/cli.md)"
    parts = [f"# {title}", sentence, *filter(None, map(entries.__getitem__, order)), f"**Next:** {more}."]
    return "\n\n".join(parts) + "\n"


def entry_of(package: str, title: str, name: str, value: Any) -> str:
    """The entry of a name: heading, summary, and the path from which the site takes the rest."""
    heading = f"## {title}.{name}"
    if isinstance(value, types.ModuleType):
        summary = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
        return f"{heading}\n\nSee [{PAGES[name][0]}]({name}.md)." if name in PAGES else f"{heading}\n\n{summary}"
    if package == "transform" and name in rh.transform.passes():
        summary = " ".join(rh.transform.find_pass(name).summary.split())
        return f"{heading}\n\n{summary[0].upper()}{summary[1:]}\n\n<!-- pass {name} -->"
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return f"{heading}\n\nThe constant `{value!r}`."
    if package == "frontend" and name in rh.__all__:
        return f"{heading}\n\nThe same as [rh.{name}](relax_hetero.md#rh{name.lower()})."
    if (package, name) == ("vm", "load"):
        return f"{heading}\n\nThe same as [rh.load](relax_hetero.md#rhload)."
    summary = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return f"{heading}\n\n{summary}\n\n::: {value.__module__}.{value.__qualname__}"


def main() -> int:
    """Write the pages or compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the pages")
    parser.add_argument("--check", action="store_true", help="compare them with the public names")
    options = parser.parse_args()
    old = []
    for package in PAGES:
        path, text = API / f"{package}.md", page_of(package)
        if not path.exists() or path.read_text() != text:
            old.append(path.name)
            if options.write:
                path.write_text(text)
    if options.check and old:
        sys.stdout.write(f"out of date: {', '.join(old)}; run python docs/tools/api_pages.py --write\n")
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
