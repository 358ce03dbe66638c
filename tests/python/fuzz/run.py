"""Attack the library for a while: ``python tests/python/fuzz/run.py --seconds 3600`` (``make fuzz``).

``--kinds`` chooses attacks, ``--seed`` where to begin (else the clock does), ``--repeat KIND SEED`` runs one case again
in this process. Exits with 1 if something was found.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3] / "python"), str(Path(__file__).parents[1])]

from fuzz.attacks import KINDS, kind_of, possible  # noqa: E402
from fuzz.harness import HARMLESS, Report, be_child, run, tried  # noqa: E402

SLICE_S = 120.0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--repeat", nargs=2, metavar=("KIND", "SEED"))
    parser.add_argument("--show", nargs="+", default=(), help="harmless outcomes to be shown, such as declined")
    parser.add_argument("--child", nargs=3, metavar=("KIND", "SEED", "CASES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, seed, cases = options.child
        be_child(kind_of(name).load(), int(seed), int(cases), kind_of(name).limit_memory)
        return 0
    if options.repeat:
        outcome = tried(kind_of(options.repeat[0]).load(), int(options.repeat[1]))
        print(outcome.kind, outcome.detail, sep="\n")
        return int(outcome.kind not in HARMLESS)
    seed = int(time.time()) * 1000 if options.seed is None else options.seed
    return _attack(possible(list(options.kinds)), options.seconds, seed, Report(shown=options.show))


def _attack(names: list[str], seconds: float, seed: int, report: Report) -> int:
    """The kinds in turns, until the time is over."""
    end = time.monotonic() + seconds
    seeds = dict.fromkeys(names, seed)
    shown = 0
    while time.monotonic() < end:
        for name in names:
            slice_s = min(SLICE_S, seconds / len(names), end - time.monotonic())
            seeds[name] = run(name, slice_s, seeds[name], report, kind_of(name).environment(), most_findings=10**9)
            for attack, number, what, detail in report.findings[shown:]:
                print(f"--- {what}: repeat with `--repeat {attack} {number}`\n{detail}", flush=True)
            shown = len(report.findings)
            print(f"{time.monotonic() - end + seconds:.0f} s, {report.total} cases, {shown} findings", flush=True)
    print(", ".join(f"{count} {name}" for name, count in sorted(report.tried.items())))
    return int(any(kind not in HARMLESS for _, _, kind, _ in report.findings))


if __name__ == "__main__":
    sys.exit(main())
