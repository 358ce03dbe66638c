"""Files of reports, for `Executable.report` and ``relax-hetero explain --html``."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import HeteroError
from .executable_report import report_of
from .page import data_of, page_of
from .page.embedding import SCHEMA, text_of
from .text.plan_tables import lines

if TYPE_CHECKING:
    from ..frontend.gguf.model_plan import ModelPlan
    from ..llm.token_cost import TokenCost
    from ..vm.file.executable import Executable
    from ..vm.profile import Profile
    from ..vm.queue.trace import Trace


def write_report(
    executable: Executable,
    path: str | os.PathLike[str],
    *,
    profile: Profile | Sequence[Profile] | None = None,
    trace: Trace | None = None,
    token: TokenCost | None = None,
    bench: dict[str, Any] | None = None,
    compare: str | os.PathLike[str] | None = None,
    title: str = "",
) -> None:
    """Write the report of an executable as an HTML file, or only its data if the path ends in ``.json``.

    Provider of ``Executable.report``. Raises HeteroError if the path cannot be written, `compare` is not a report, or
    another compiler made the executable.
    """
    target = report_path(path)
    previous = None if compare is None else read_report(compare)
    title = title or target.stem
    data = report_of(executable, profile=profile, trace=trace, token=token, bench=bench, title=title)
    write_page(text_of(data) if target.suffix == ".json" else page_of(data, previous), target)


def write_plan(plan: ModelPlan, path: str | os.PathLike[str]) -> None:
    """Write the plan of a language model as an HTML file, or only its data if the path ends in ``.json``.

    Raises HeteroError if the path cannot be written.
    """
    target = report_path(path)
    data = {
        "schema": SCHEMA,
        "kind": "plan",
        "title": Path(plan.model).stem,
        "made": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "devices": [{"name": use.name} for use in plan.devices],
        "notes": list(lines(plan)),
        "plan": plan.to_json(),
    }
    write_page(text_of(data) if target.suffix == ".json" else page_of(data), target)


def write_page(text: str, target: Path) -> None:
    """Write a page. Raises HeteroError if the file cannot be written."""
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HeteroError(f"cannot write the report {target}: {error.strerror or error}") from error


def report_path(path: str | os.PathLike[str]) -> Path:
    """Check the path of a report before it is made.

    Raises HeteroError if the path is a folder, its folder does not exist, or it is not writable.
    """
    target = Path(path)
    if target.is_dir():
        raise HeteroError(f"cannot write the report {target}: it is a folder; give the name of a file in it")
    if not target.parent.is_dir():
        raise HeteroError(f"cannot write the report {target}: there is no folder {target.parent}; make it first")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise HeteroError(f"cannot write the report {target}: permission denied; give a path that you may write")
    return target


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the data of a report, an HTML page or JSON.

    Raises HeteroError if the file cannot be read, or is not a report.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(text) if text.lstrip().startswith("{") else data_of(text)
    except (OSError, ValueError, HeteroError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise HeteroError(f"cannot compare with {path}: {reason}; expected a report that was written before") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        reason = f"its schema is {schema!r}, and this version reads {SCHEMA}" if schema else "its data has no schema"
        raise HeteroError(f"cannot compare with {path}: {reason}; expected a report that was written before")
    return dict(data)
