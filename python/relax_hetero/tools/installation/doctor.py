"""``relax-hetero doctor``: what is installed, which devices there are, whether they work, and what to do."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from ...display.console import console, print_json, print_table
from ...display.text import plural
from ..command import command, json_option
from .cache_finding import cache_finding
from .findings import Finding, broken
from .packages import extra_findings, package_findings, versions
from .probe import probe_findings

_SECTIONS = ("packages", "extras", "devices", "tools", "self-test")
_SIGNS = {"ok": "ok", "absent": "-", "warning": "warning", "error": "ERROR"}


@command("doctor")
@click.option(
    "--self-test/--no-self-test",
    default=True,
    show_default=True,
    help="Run a small model on each device, or list only what is installed.",
)
@json_option
def doctor_command(self_test: bool, as_json: bool) -> None:
    """Say what is installed, which devices there are, whether a model runs on them, and what to mend.

    Exits with 1 if something that is needed is broken. The self-test takes about five seconds.
    """
    findings = [*package_findings(), *extra_findings(), cache_finding()]
    if self_test:
        with console(stderr=True).status("Trying the devices"):
            found, devices = probe_findings()
        findings += found
    else:
        devices = []
    wrong = broken(findings)
    if as_json:
        print_json({"ok": not wrong, "versions": versions(), "devices": devices, "findings": [*map(asdict, findings)]})
    else:
        _show(findings, wrong)
    if wrong:
        sys.exit(1)


def _show(findings: list[Finding], wrong: list[Finding]) -> None:
    for section in _SECTIONS:
        rows = [[f.name, _SIGNS[f.state], f.about] for f in findings if f.section == section]
        if rows:
            print_table(section.capitalize(), ["name", "state", "found"], rows)
    out = console()
    for title, states in (("To mend", ("error", "warning")), ("To add, if you want it", ("absent",))):
        lines = [f"  {f.name}: {f.fix}" for f in findings if f.state in states and f.fix]
        if lines:
            out.print("\n".join([f"{title}:", *lines]), markup=False, soft_wrap=True)
    verdict = f"{plural(len(wrong), 'thing')} that is needed does not work." if wrong else "All that is needed works."
    out.print(verdict, markup=False)
