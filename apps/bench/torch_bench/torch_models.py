"""Networks defined in PyTorch: exported to ONNX against ONNX Runtime, by `rh.from_torch` against torch.compile.

python apps/bench/torch_bench/torch_models.py                                   # every network: long
python apps/bench/torch_bench/torch_models.py resnet50 swin_t --json results.json
python apps/bench/torch_bench/torch_models.py bert_base --peers ours,onnxruntime --exporter old
python apps/bench/torch_bench/torch_models.py bert_base --rounds 0      # exports, compiles and checks
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model_bench.model_worker import Job, shortened
from model_bench.report import LEFT, remarks
from model_bench.rich_tables import rich_table, terminal
from model_bench.runs import at_once, prepare, time_models
from model_peers import FROM_TORCH, OURS, PEERS
from model_zoo import cache
from peers.packages import is_installed
from smoke import smoke

from torch_bench.networks import NETWORKS
from torch_bench.report import summary, table

ALLOWED = (1e-3, 1e-4)
"""Allowed error compared with ONNX Runtime: relative, and of the largest number of an output."""


@click.command()
@click.argument("networks", nargs=-1)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@click.option("--peers", default=f"{OURS},onnxruntime,{FROM_TORCH},inductor", show_default=True)
@click.option("--exporter", default="new", show_default=True, type=click.Choice(["new", "old"]), help="torch.onnx's.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(0), help="Turns of each; 0 checks only.")
@click.option("--seconds", default=2.0, show_default=True, help="Timed seconds of each contestant, in all its turns.")
@click.option("--cap", default=5.0, show_default=True, help="A slower first call, in seconds, is the only one.")
@click.option("--compile-limit", default=900.0, show_default=True, help="Seconds allowed to export or compile.")
@click.option("--folder", type=click.Path(path_type=Path), help="Folder that keeps files for reuse.")
@click.option("--seed", default=0, show_default=True, help="Seed of the order of turns.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="File to write results to.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@smoke(networks=("shufflenet_v2_x1_0",), peers=f"{OURS},{FROM_TORCH},eager", rounds=1, seconds=0.01)
def main(
    networks: tuple[str, ...],
    threads: int,
    peers: str,
    exporter: str,
    rounds: int,
    seconds: float,
    cap: float,
    compile_limit: float,
    folder: Path | None,
    seed: int,
    json_file: Path | None,
    as_markdown: bool,
) -> None:
    """Time NETWORKS (names; default: all of them)."""
    keys = tuple(key.strip() for key in peers.split(",") if key.strip())
    _check(networks, keys)
    folder = folder or cache().parent / "torch" / exporter
    folder.mkdir(parents=True, exist_ok=True)
    # The process that times finds inductor's compiled code in this cache.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder.resolve() / "inductor"))
    results: list[dict[str, Any]] = []
    for name in networks or tuple(NETWORKS):
        try:
            job = _exported(name, folder, keys, threads, seconds / max(rounds, 1), exporter, compile_limit)
        except RuntimeError as failure:
            click.echo(f"{name}: {failure}", err=True)
            continue
        job, rows = prepare(job, folder, name, compile_limit)
        time_models(job, rows, rounds, cap, False, seed)
        results.append({"model": name, "threads": threads, "rows": rows})
        if json_file:  # each time, so that an interrupt does not lose results
            json_file.write_text(json.dumps({"made": time.strftime("%Y-%m-%d"), "results": results}, indent=1))
    _print(results, as_markdown)
    if any("wrong numbers" in row.get("failure", "") for result in results for row in result["rows"].values()):
        raise SystemExit("a contestant computed wrong numbers")


def _check(networks: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Refuse unknown names, and packages that are not installed, before anything runs."""
    for name in networks:
        if name not in NETWORKS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(NETWORKS)}", param_hint="NETWORKS")
    for key in keys:
        if key not in PEERS:
            raise click.BadParameter(f"{key!r} is none of {', '.join(PEERS)}", param_hint="--peers")
    needed = ["torch", "onnxscript", "onnxruntime", *(NETWORKS[name].package for name in networks or NETWORKS)]
    missing = [package for package in dict.fromkeys(needed) if not is_installed(package)]
    if missing:
        raise click.ClickException(
            f"not installed: {', '.join(missing)}; relax-hetero[torch] brings torch, and pip installs the others"
        )


def _exported(
    name: str, folder: Path, keys: tuple[str, ...], threads: int, seconds: float, exporter: str, limit: float
) -> Job:
    """A job of the network's ONNX file, which is exported on first use, with ONNX Runtime's results.

    Raises
    ------
    RuntimeError
        If the export or ONNX Runtime failed.
    """
    file, arrays = folder / f"{name}.onnx", folder / f"{name}.npz"
    job = Job("reference", str(file), (), {}, threads, str(arrays), seconds, allowed=ALLOWED)
    if not file.exists():
        command = [sys.executable, "-m", "torch_bench.exporting", name, str(file), str(arrays), exporter]
        _run(command, job.environment(), limit)
        answer = at_once(job, limit)
        if "failure" in answer:
            file.unlink()
            raise RuntimeError(f"no reference by ONNX Runtime: {answer['failure']}")
    return Job("turns", str(file), keys, {}, threads, str(arrays), seconds, allowed=ALLOWED)


def _run(command: list[str], environment: dict[str, str], limit: float) -> None:
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"not exported after {limit:.0f} s") from error
    if process.returncode:
        raise RuntimeError(f"not exported: {shortened(process.stderr.strip().splitlines()[-1])}")


def _print(results: list[dict[str, Any]], as_markdown: bool) -> None:
    title, columns, rows = table(results)
    lines = [*summary(results), *remarks(results)]
    if as_markdown:
        cells = [columns, ["---"] * len(columns), *rows]
        click.echo("\n".join([f"### {title}", "", *("| " + " | ".join(row) + " |" for row in cells), ""]))
        click.echo("\n".join(f"- {line}" for line in lines))
        return
    console = terminal()
    console.print(rich_table(title, columns, rows, LEFT))
    for line in lines:
        console.print(line, markup=False)


if __name__ == "__main__":
    main()
