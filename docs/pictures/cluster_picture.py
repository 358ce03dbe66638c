"""The picture in docs/guides/cluster.md: its model after the cut over two hosts.

python docs/pictures/cluster_picture.py                      # writes docs/pictures/cluster.svg
python docs/pictures/cluster_picture.py /tmp/picture.png     # another file, of any format that matplotlib writes

Steps and arrows are read from the program, so the picture shows what the library does with the model.
Needs matplotlib, which is in the ``bench`` extra.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import onnx.parser
from two_devices_picture import LANES, STRONG, TRANSFER

import relax_hetero as rh
from relax_hetero.cluster.call_plan import CALL, CallPlan, Program, sources_of
from relax_hetero.cluster.cut.cut_module import cut_module

PICTURE = Path(__file__).with_name("cluster.svg")
MODEL = """
    <ir_version: 8, opset_import: ["" : 17]>
    ranker (float[4, 64] x, float[64, 512] w, float[512, 10] v) => (int64[4] best) {
        [embed] h = MatMul(x, w)
        [relu] a = Relu(h)
        [score] s = MatMul(a, v)
        [choose] best = ArgMax <axis = 1, keepdims = 0> (s)
    }"""
PLACEMENT = {"score": "b/llvm", "choose": "b/llvm"}

WIDTH, HEIGHT, LANE = 2.6, 0.8, 1.3


def read_program() -> Program:
    """The model's program, for this CPU on both hosts."""
    mod = rh.from_onnx(onnx.parser.parse_model(MODEL), vdevices=["a/llvm", "b/llvm"], placement=PLACEMENT)
    natives = {host: {("llvm", 0): rh.native("llvm")} for host in ("a", "b")}
    return cut_module(mod, natives=natives)


def draw(picture: Path) -> None:
    """Draw the caller, the steps of each host in its lane, and the values sent between them.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    program = read_program()
    plan = program.functions["main"]
    hosts = list(program.parts)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cluster", "font.size": 9}):
        right = 3.6 * (len(plan.steps) + 1) + 0.6
        figure = Figure(figsize=(right * 0.72, 2.9), layout="constrained")
        axes = figure.subplots()
        axes.set_xlim(-1.6, right)
        axes.set_ylim(-LANE - 0.1, LANE + 0.1)
        axes.axis("off")
        for index, host in enumerate(hosts):
            _lane(axes, index, host, right)
        places = {number: (3.6 * (number + 1), _line(hosts.index(step.host))) for number, step in enumerate(plan.steps)}
        places[CALL] = (0.0, 0.0)
        _box(axes, "caller", "Cluster", places[CALL], "#444444")
        for number, step in enumerate(plan.steps):
            _box(axes, f"step {step.function}", f"of host {step.host}", places[number], STRONG[hosts.index(step.host)])
        for number, sources in _arrows(plan).items():
            for source, names in sources.items():
                _arrow(axes, places[source], places[number], names)
        last = max(source.step for source in sources_of(plan.result))
        end = (right - 0.3, places[last][1])
        _arrow(axes, places[last], (end[0] + WIDTH / 2, end[1]), "best")
        figure.savefig(picture, dpi=130, metadata={"Date": None} if picture.suffix == ".svg" else None)


def _arrows(plan: CallPlan) -> dict[int, dict[int, str]]:
    """For each step, the steps whose values it reads, and the names of these values."""
    arrows: dict[int, dict[int, list[str]]] = {}
    for number, step in enumerate(plan.steps):
        for source in step.arguments:
            name = plan.input_names[source.index] if source.step == CALL else "value"
            arrows.setdefault(number, {}).setdefault(source.step, []).append(name)
    return {number: {step: ", ".join(names) for step, names in each.items()} for number, each in arrows.items()}


def _line(index: int) -> float:
    return 0.66 if index == 0 else -0.66


def _lane(axes: Any, index: int, host: str, right: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    bottom = 0.05 if index == 0 else -LANE
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch((1.9, bottom), right - 2.0, LANE - 0.05, boxstyle=style, facecolor=LANES[index], linewidth=0)
    )
    height = LANE - 0.12 if index == 0 else -LANE + 0.08
    axes.text(
        right - 0.25, height, f"host {host}", color=STRONG[index], fontsize=12, fontweight="bold", ha="right",
        va="top" if index == 0 else "bottom",
    )  # fmt: skip


def _box(axes: Any, name: str, below: str, place: tuple[float, float], color: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = place
    corner = (x - WIDTH / 2, y - HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.1"
    axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle=style, facecolor="white", edgecolor=color, zorder=3))
    axes.text(x, y + 0.13, name, ha="center", va="center", fontweight="bold", zorder=4)
    axes.text(x, y - 0.17, below, ha="center", va="center", fontsize=7.5, color="#444444", zorder=4)


def _arrow(axes: Any, source: tuple[float, float], end: tuple[float, float], names: str) -> None:
    start, tip = (source[0] + WIDTH / 2, source[1]), (end[0] - WIDTH / 2, end[1])
    look = {"arrowstyle": "-|>", "color": TRANSFER, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", tip, start, arrowprops=look, zorder=5)
    middle = ((start[0] + tip[0]) / 2, (start[1] + tip[1]) / 2)
    look = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(*middle, names, ha="center", va="center", color=TRANSFER, fontsize=8, zorder=6, bbox=look)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE)
    draw(parser.parse_args().picture)
