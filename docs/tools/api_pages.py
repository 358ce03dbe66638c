"""The pages of docs/api/: each public name with its summary, behind it the place that its docstring is taken from.

python docs/tools/api_pages.py --write    # writes them
python docs/tools/api_pages.py --check    # fails where they are out of date
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
        "What most programs need: import a model, compile it, load it, and the errors that all of this raises.",
    ),
    "transform": ("rh.transform", "Passes, each a `tvm.transform.Pass` that can stand in any `Sequential`."),
    "op": ("rh.op", "Relax operators of the library; TVMScript writes them `R.hetero.matmul` and so on."),
    "encoding": ("rh.encoding", "Encodings, layouts and the problems that kernels solve; the registry of resolvers."),
    "vm": ("rh.vm", "Executables and the virtual machine that runs them; TVM's runtime is enough for it."),
    "frontend": ("rh.frontend", "Import of models, and placement by a cost model."),
    "llm": ("rh.llm", "Language models: the engine, its cache, sampling, tokenizers."),
    "cluster": ("rh.cluster", "One module over several hosts."),
}
"""A page: the name that users write, and its first sentence. The order is that of the site."""


def page_of(room: str) -> str:
    """The page of one room."""
    shown, sentence = PAGES[room]
    module: Any = rh if room == "relax_hetero" else getattr(__import__(f"relax_hetero.{room}"), room)
    names = [name for name in module.__all__ if not name.startswith("__")]
    entries = {name: entry_of(room, shown, name, getattr(module, name)) for name in names}
    order = sorted(entries, key=lambda name: (name.lower(), name))
    after = [*PAGES, None][list(PAGES).index(room) + 1]
    more = f"[{PAGES[after][0]}]({after}.md)" if after else "[the command line](../reference/cli.md)"
    parts = [f"# {shown}", sentence, *filter(None, map(entries.__getitem__, order)), f"**Next:** {more}."]
    return "\n\n".join(parts) + "\n"


def entry_of(room: str, shown: str, name: str, value: Any) -> str:
    """A name: heading, summary, and where the site takes the rest from."""
    heading = f"## {shown}.{name}"
    if isinstance(value, types.ModuleType):
        summary = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
        return f"{heading}\n\nSee [{PAGES[name][0]}]({name}.md)." if name in PAGES else f"{heading}\n\n{summary}"
    if room == "transform" and name in rh.transform.passes():
        summary = " ".join(rh.transform.find_pass(name).summary.split())
        return f"{heading}\n\n{summary[0].upper()}{summary[1:]}\n\n<!-- pass {name} -->"
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return f"{heading}\n\nThe constant `{value!r}`."
    if room == "frontend" and name in rh.__all__:
        return f"{heading}\n\nThe same as [rh.{name}](relax_hetero.md#rh{name.lower()})."
    if (room, name) == ("vm", "load"):
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
    for room in PAGES:
        path, text = API / f"{room}.md", page_of(room)
        if not path.exists() or path.read_text() != text:
            old.append(path.name)
            if options.write:
                path.write_text(text)
    if options.check and old:
        sys.stdout.write(f"out of date: {', '.join(old)}; run python docs/tools/api_pages.py --write\n")
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
