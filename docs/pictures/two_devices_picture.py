"""The picture in README.md: its model after placement on two devices.

python docs/pictures/two_devices_picture.py                       # writes docs/pictures/two-devices.svg
python docs/pictures/two_devices_picture.py /tmp/picture.png      # another file, of any format that matplotlib writes

Boxes, arrows and transfers are read from the placed module, so the picture shows what the library does with the model.
Needs matplotlib, which is in the ``bench`` extra.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import onnx.parser
from tvm import relax

import relax_hetero as rh

PICTURE = Path(__file__).with_name("two-devices.svg")
MODEL = """
    <ir_version: 8, opset_import: ["" : 17]>
    ranker (float[4, 64] x, float[64, 512] w, float[512, 10] v) => (int64[4] best) {
        [embed] h = MatMul(x, w)
        [relu] a = Relu(h)
        [score] s = MatMul(a, v)
        [softmax] p = Softmax(s)
        [choose] best = ArgMax <axis = 1, keepdims = 0> (p)
    }"""
PLACEMENT = {"score": "llvm:1", "softmax": "llvm:1"}

LANES = ("#dbe9f6", "#fde6cf")  # the devices' backgrounds
STRONG = ("#2b6ca3", "#c46a12")  # their names and the frames of their ops
TRANSFER = "#8a2846"
LANE, BOX, WIDTH = 1.9, 0.62, 1.5  # heights of a device and of an op, width of an op


class Node(NamedTuple):
    """A parameter or an op, drawn as a box; a transfer is drawn as an arrow instead."""

    name: str
    op: str
    device: int
    reads: list[str]
    shape: str


def read_module() -> tuple[list[Node], list[Node]]:
    """Parameters, and ops and transfers in program order."""
    mod = rh.from_onnx(onnx.parser.parse_model(MODEL), vdevices=["llvm", "llvm"], placement=PLACEMENT)
    func = mod["main"]
    params = [_node(param, "", []) for param in func.params]
    steps = []
    for block in func.body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call):
                reads = [operand.name for operand in binding.value.args if isinstance(operand, relax.Var)]
                steps.append(_node(binding.var, binding.value.op.name.rpartition(".")[2], reads))
    return params, steps


def _node(var: relax.Var, op: str, reads: list[str]) -> Node:
    shape = " × ".join(str(int(extent)) for extent in var.ty.shape.values)
    return Node(var.name, op, var.ty.vdevice.vdevice_id, reads, f"{var.ty.dtype} {shape}")


def draw(picture: Path) -> None:
    """Draw the module: a lane for each device, ops from left to right, transfers as arrows between lanes.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    params, steps = read_module()
    nodes = {node.name: node for node in (*params, *steps)}
    places = _places(params, steps)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "two devices", "font.size": 9}):
        right = max(x for x, _ in places.values()) + 1.3
        figure = Figure(figsize=(right * 1.02, 4.0), layout="constrained")
        axes = figure.subplots()
        axes.set_xlim(-1.2, right)
        axes.set_ylim(-LANE - 0.1, LANE + 0.1)
        axes.set_aspect("equal")
        axes.axis("off")
        for device in range(2):
            _lane(axes, device, right)
        for name, place in places.items():
            _box(axes, nodes[name], place)
        for node in steps:
            for source in node.reads:
                if node.name in places and source in places:
                    _arrow(axes, places[source], places[node.name])
                elif node.name in places:
                    transfer = nodes[source]
                    _transfer(axes, transfer, places[transfer.reads[0]], places[node.name])
        figure.savefig(picture, dpi=130, metadata={"Date": None} if picture.suffix == ".svg" else None)


def _places(params: list[Node], steps: list[Node]) -> dict[str, tuple[float, float]]:
    """The middle of each box: ops in one line, a column each, parameters next to or below their first reader."""
    places: dict[str, tuple[float, float]] = {}
    column = 1
    for step in steps:
        if step.op == "to_vdevice":
            continue
        places[step.name] = (column * 2.0, _line(step.device))
        for read in step.reads:
            param = next((param for param in params if param.name == read), None)
            if param is not None and read not in places:
                in_line = not any(step_before in places for step_before in step.reads) and column == 1
                outwards = 1 if step.device == 0 else -1
                middle = (0.0, _line(step.device)) if in_line else (column * 2.0, _line(step.device) + outwards * 0.95)
                places[read] = middle
        column += 1
    return places


def _line(device: int) -> float:
    return 0.62 if device == 0 else -0.62


def _lane(axes: Any, device: int, right: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    bottom = 0.06 if device == 0 else -LANE
    style = "round,pad=0,rounding_size=0.12"
    lane = FancyBboxPatch(
        (-1.1, bottom), right + 1.0, LANE - 0.06, boxstyle=style, facecolor=LANES[device], linewidth=0
    )
    axes.add_patch(lane)
    height = LANE - 0.18 if device == 0 else -LANE + 0.12
    name = f"llvm:{device}"
    text = {"color": STRONG[device], "fontsize": 12, "fontweight": "bold", "ha": "right"}
    axes.text(right - 0.25, height, name, va="top" if device == 0 else "bottom", **text)


def _box(axes: Any, node: Node, place: tuple[float, float]) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = place
    color = STRONG[node.device]
    width = WIDTH if node.op else WIDTH * 0.94
    height = BOX if node.op else BOX * 0.8
    style = f"round,pad=0,rounding_size={0.08 if node.op else 0.24}"
    corner = (x - width / 2, y - height / 2)
    fill = "white" if node.op else LANES[node.device]
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=fill, edgecolor=color, zorder=3))
    axes.text(x, y + 0.1, node.name, ha="center", va="center", fontweight="bold", zorder=4)
    axes.text(x, y - 0.13, node.op or node.shape, ha="center", va="center", fontsize=7.5, color="#444444", zorder=4)


def _arrow(axes: Any, source: tuple[float, float], end: tuple[float, float]) -> None:
    if source[0] == end[0]:  # a weight above or below its op
        down = 1 if source[1] > end[1] else -1
        start, tip = (source[0], source[1] - down * BOX * 0.4), (end[0], end[1] + down * BOX / 2)
    else:
        start, tip = (source[0] + WIDTH / 2, source[1]), (end[0] - WIDTH / 2, end[1])
    axes.annotate("", tip, start, arrowprops={"arrowstyle": "-|>", "color": "#444444", "shrinkA": 0, "shrinkB": 0})


def _transfer(axes: Any, transfer: Node, source: tuple[float, float], end: tuple[float, float]) -> None:
    down = 1 if source[1] > end[1] else -1
    start, tip = (source[0] + WIDTH / 2, source[1] - down * 0.12), (end[0] - WIDTH / 2, end[1] + down * 0.12)
    look = {"arrowstyle": "-|>", "color": TRANSFER, "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", tip, start, arrowprops=look, zorder=5)
    middle = ((start[0] + tip[0]) / 2, (start[1] + tip[1]) / 2)
    text = {"color": TRANSFER, "fontsize": 7.5, "ha": "left", "va": "center", "zorder": 5}
    axes.text(middle[0] + 0.22, middle[1], f"to_vdevice\n{transfer.shape}", **text)


def main() -> None:
    """Draw the picture to the path of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", nargs="?", type=Path, default=PICTURE)
    draw(parser.parse_args().picture)


if __name__ == "__main__":
    main()
