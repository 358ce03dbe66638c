"""The picture in docs/explanation/scaling.md: a token's time and all tokens per second, by arrangement and texts.

python docs/pictures/scaling_picture.py                       # writes docs/pictures/scaling.svg

Simulated, of the fleet and the model in that document. Needs matplotlib, which is in the ``bench`` extra.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).with_name("scaling.svg")
GPU = '{"kind": "cuda", "arch": "sm_90a"}'
FLEET = ["--vdevice", GPU, "--devices", "8", "--hosts", "16", "--network", "50", "10", "--memory-limit", "80GiB"]
TEXTS = (128, 512, 2048, 8192, 16384)
SHOWN = {(4, 1): "#2b6ca3", (1, 1): "#c46a12", (4, 32): "#8a2846"}
"""Tensor and stages -> color."""
RANDOM_GGUF = Path(__file__).parents[2] / "apps/bench/llm_bench/random_gguf.py"


def simulate() -> dict[tuple[int, int], list[tuple[int, float, float]]]:
    """Texts, milliseconds of a token, and tokens per second of each arrangement."""
    found: dict[tuple[int, int], list[tuple[int, float, float]]] = {shape: [] for shape in SHOWN}
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder, "model.gguf"))
        subprocess.run([sys.executable, str(RANDOM_GGUF), model, "--shape", "30b-a3b", "--sparse"], check=True)
        for texts in TEXTS:
            command = [sys.executable, "-m", "relax_hetero", "scale", model, *FLEET, "--texts", str(texts), "--json"]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for each in json.loads(output)["arrangements"]:
                if (shape := (each["tensor"], each["stages"])) in found:
                    found[shape].append((texts, each["token_seconds"] * 1e3, each["tokens_per_second"]))
    return found


def draw(path: Path) -> None:
    """Draw the picture."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "relax_hetero"  # equal files for equal pictures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    for (tensor, stages), points in simulate().items():
        replicas = 128 // (tensor * stages)
        name = f"groups of {tensor}" if tensor > 1 else "single devices"
        name += f" in {stages} stages" * (stages > 1) + f", {replicas} replica" + "s" * (replicas > 1)
        axes.plot(*zip(*(point[1:] for point in points), strict=True), "o-", color=SHOWN[tensor, stages], label=name)
        for texts, milliseconds, rate in points:
            axes.annotate(f"{texts:,}", (milliseconds, rate), (5, -11), textcoords="offset points", fontsize=7.5)
    axes.set(xscale="log", yscale="log", xlabel="time of a token, ms", ylabel="tokens per second of all texts")
    axes.set_title("Qwen 3 30B-A3B in 4 bits on 128 H100, simulated; numbers of texts", fontsize=10)
    for axis, ticks in ((axes.xaxis, (2, 3, 5, 10, 20)), (axes.yaxis, (50_000, 100_000, 200_000, 500_000, 1_000_000))):
        axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.set_minor_formatter("")
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Draw the picture to the path of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", nargs="?", type=Path, default=PICTURE)
    draw(parser.parse_args().picture)


if __name__ == "__main__":
    main()
