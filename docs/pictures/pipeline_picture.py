"""The pictures of the site's home page and of design.md: the stages of rh.compile, and the rooms of the code.

python docs/pictures/pipeline_picture.py --write    # writes pipeline.svg and rooms.svg
python docs/pictures/pipeline_picture.py --check    # fails where they are out of date

Stages and passes are those of the pipeline, rooms those of the contract in pyproject.toml. The ground is white, so that
the pictures can be read on dark pages.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from itertools import groupby
from pathlib import Path

from relax_hetero.driver.pipeline import pipeline_steps

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COLORS = {
    "ir": "#8a94a6", "simplify": "#5b8c5a", "placement": "#2b6ca3", "sizes": "#7a6bb0", "quantize": "#b08a3e",
    "fuse": "#c46a12", "encode": "#8a2846", "permute": "#3a8f8f", "dispatch": "#4a6fb5", "record": "#946030",
    "partition": "#6b8e23", "lower": "#555f70",
}  # fmt: skip
ROOMS = {
    "tools": "the command line",
    "report": "pictures and tables to look at",
    "llm": "language models: engine, cache, server",
    "frontend": "import of ONNX, PyTorch and GGUF",
    "cluster": "modules over several hosts",
    "backends": "the kinds of devices, a class each",
    "driver": "rh.compile: pipeline, cache, linking",
    "transform": "passes, a folder for each stage",
    "resolvers": "layouts and kernels of each device",
    "tir": "generators of kernels",
    "op": "Relax ops of the library",
    "encoding": "encodings, layouts, problems",
    "vm": "the virtual machine; needs no compiler",
    "artifact": "an executable as plain data",
    "target": "vdevices, facts about CPUs and GPUs",
    "providers": "work of higher rooms, by name",
    "watch_tvmscript": "strict look-up of devices",
    "errors": "exceptions",
}
"""A phrase for each room of the contract."""


def pipeline() -> str:
    """A box for each run of passes of one stage, from left to right and line by line."""
    stages = [(stage, [step.name for step in run]) for stage, run in groupby(pipeline_steps(), key=lambda s: s.stage)]
    columns, width, gap, top = 4, 226, 26, 14
    rows = [stages[first : first + columns] for first in range(0, len(stages), columns)]
    parts, y = [], top
    for number, row in enumerate(rows):
        height = 40 + 20 * max(len(names) for _, names in row)
        for column, (stage, names) in enumerate(row):
            x = 14 + column * (width + gap)
            parts += _box(x, y, width, height, stage, names)
            if (number, column) != (len(rows) - 1, len(row) - 1):
                parts.append(_arrow(x, y, width, height, gap, last=column == columns - 1))
        y += height + 34
    return _svg(14 * 2 + columns * width + (columns - 1) * gap, y - 20, parts, "The stages of rh.compile")


def rooms() -> str:
    """The rooms one above the other, as the contract on imports has them."""
    parts, y, width = [], 14, 660
    for layer in _layers():
        height = 34
        names = [name for name in layer if name != "__main__"]
        if not names:
            continue
        for column, name in enumerate(names):
            share = (width - 12 * (len(names) - 1)) / len(names)
            x = 14 + column * (share + 12)
            beside = x + 125 if len(names) == 1 else x + 24 + 8.6 * len(name)
            parts.append(f'<rect class="box" x="{x:g}" y="{y}" width="{share:g}" height="{height}" rx="7"/>')
            parts.append(f'<text class="name" x="{x + 14:g}" y="{y + 22}">{escape(name)}</text>')
            parts.append(f'<text class="text" x="{beside:g}" y="{y + 22}">{escape(ROOMS[name])}</text>')
        y += height + 7
    parts.append(f'<text class="text" x="14" y="{y + 16}">A room imports only rooms below it.</text>')
    return _svg(width + 28, y + 30, parts, "The rooms of the package")


def _layers() -> list[list[str]]:
    text = (ROOT / "pyproject.toml").read_text().partition("\nlayers = [\n")[2].partition("\n]")[0]
    return [[name.strip() for name in line.strip(' ",').split("|")] for line in text.splitlines()]


def _box(x: int, y: int, width: int, height: int, stage: str, names: list[str]) -> list[str]:
    color = COLORS[stage]
    parts = [
        f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>',
        f'<rect x="{x}" y="{y}" width="7" height="{height}" rx="3" fill="{color}"/>',
        f'<text class="name" x="{x + 20}" y="{y + 23}">{escape(stage)}</text>',
    ]
    lines = enumerate(names)
    return parts + [f'<text class="text" x="{x + 20}" y="{y + 44 + 20 * n}">{escape(name)}</text>' for n, name in lines]


def _arrow(x: int, y: int, width: int, height: int, gap: int, last: bool) -> str:
    middle = y + 20
    if last:  # to the first box of the next line
        bottom = y + height
        path = f"M{x + width / 2:g} {bottom} v17 H{14 + width / 2:g} v13"
    else:
        path = f"M{x + width} {middle} h{gap - 4}"
    return f'<path class="arrow" d="{path}" marker-end="url(#tip)"/>'


def _svg(width: int, height: int, parts: list[str], title: str) -> str:
    style = (
        ".box{fill:#f6f8fb;stroke:#9aa7b8}.name{font:600 15px sans-serif;fill:#1d2733}"
        ".text{font:13px sans-serif;fill:#46525f}.arrow{fill:none;stroke:#7b8897;stroke-width:1.6}"
    )
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#7b8897"/></marker>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>{escape(title)}</title><style>{style}</style><defs>{tip}</defs>"
    )
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def main() -> int:
    """Write the pictures or compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the pictures")
    parser.add_argument("--check", action="store_true", help="compare them with the code")
    options = parser.parse_args()
    old = []
    for name, text in {"pipeline.svg": pipeline(), "rooms.svg": rooms()}.items():
        path = HERE / name
        if not path.exists() or path.read_text() != text:
            old.append(name)
            if options.write:
                path.write_text(text)
    if options.check and old:
        sys.stdout.write(f"out of date: {', '.join(old)}; run python docs/pictures/pipeline_picture.py --write\n")
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
