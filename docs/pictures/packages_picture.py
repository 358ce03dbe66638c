"""The picture of design.md: the packages of the code, layer by layer.

python docs/pictures/packages_picture.py --write    # writes packages.svg
python docs/pictures/packages_picture.py --check    # fails if it is out of date

Layers are those of the contract in pyproject.toml. The background is white, so that dark pages can show the picture.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("packages.svg")
ROOT = PICTURE.parents[2]
PACKAGES = {
    "tools": "the command line",
    "compat": "the interface of ONNX Runtime",
    "report": "pictures and tables to look at",
    "llm": "language models: engine, cache, server",
    "frontend": "import of ONNX, PyTorch and GGUF",
    "cluster": "modules over several hosts",
    "backends": "the kinds of devices, a class each",
    "driver": "rh.compile: cache, linking",
    "transform": "passes, a folder for each stage",
    "resolvers": "layouts and kernels of each device",
    "tir": "generators of kernels",
    "op": "Relax ops of the library",
    "encoding": "encodings, layouts, problems",
    "vm": "the virtual machine; needs no compiler",
    "artifact": "an executable as plain data",
    "target": "vdevices, facts about CPUs and GPUs",
    "display": "text, tables, elements of HTML",
    "garbage_collection": "a pause of Python's collector",
    "providers": "services of higher packages, by name",
    "import_hooks": "hooks of imports",
    "errors": "exceptions",
    "system": "Linux, macOS, Windows",
}
"""Contents of each package of the contract."""


def draw() -> str:
    """Draw packages from top to bottom, in the order of the import contract."""
    parts, y, width = [], 14, 660
    for layer in _layers():
        height = 34
        names = [name for name in layer if name != "__main__"]
        if not names:
            continue
        for column, name in enumerate(names):
            share = (width - 12 * (len(names) - 1)) / len(names)
            x = 14 + column * (share + 12)
            text_x = x + 125 if len(names) == 1 else x + 24 + 8.6 * len(name)
            parts.append(f'<rect class="box" x="{x:g}" y="{y}" width="{share:g}" height="{height}" rx="7"/>')
            parts.append(f'<text class="name" x="{x + 14:g}" y="{y + 22}">{escape(name)}</text>')
            parts.append(f'<text class="text" x="{text_x:g}" y="{y + 22}">{escape(PACKAGES[name])}</text>')
        y += height + 7
    parts.append(f'<text class="text" x="14" y="{y + 16}">A package imports only packages below it.</text>')
    style = ".box{fill:#f6f8fb;stroke:#9aa7b8}.name{font:600 15px sans-serif;fill:#1d2733}"
    style += ".text{font:13px sans-serif;fill:#46525f}"
    total = width + 28, y + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" width="{total[0]}" role="img">'
        f"<title>The packages of relax_hetero</title><style>{style}</style>"
    )
    background = f'<rect width="{total[0]}" height="{total[1]}" rx="8" fill="#fff"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def _layers() -> list[list[str]]:
    text = (ROOT / "pyproject.toml").read_text().partition("\nlayers = [\n")[2].partition("\n]")[0]
    return [[name.strip() for name in line.strip(' ",').split("|")] for line in text.splitlines()]


def main() -> int:
    """Write the picture or compare it; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the picture")
    parser.add_argument("--check", action="store_true", help="compare it with the contract")
    options = parser.parse_args()
    if options.write:
        PICTURE.write_text(draw())
    old = options.check and PICTURE.read_text() != draw()
    if old:
        sys.stdout.write(f"out of date: {PICTURE.name}; run python docs/pictures/packages_picture.py --write\n")
    return int(old)


if __name__ == "__main__":
    sys.exit(main())
