"""Reports in files: `Executable.report` and ``relax-hetero explain --html``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import HeteroError
from .executable_report import report_of
from .page import data_of, page_of
from .page.embedding import SCHEMA, text_of

if TYPE_CHECKING:
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
    """Write the report of an executable as one HTML file, or its data alone where the path ends in ``.json``.

    The provider of ``Executable.report``.

    Raises
    ------
    HeteroError
        A path that cannot be written, a file to compare with that is no report, or an executable of another compiler.
    """
    target = report_path(path)
    previous = None if compare is None else read_report(compare)
    title = title or target.stem
    data = report_of(executable, profile=profile, trace=trace, token=token, bench=bench, title=title)
    write_page(text_of(data) if target.suffix == ".json" else page_of(data, previous), target)


def write_page(text: str, target: Path) -> None:
    """Write a page.

    Raises
    ------
    HeteroError
        The file cannot be written.
    """
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HeteroError(f"cannot write the report {target}: {error.strerror or error}") from error


def report_path(path: str | os.PathLike[str]) -> Path:
    """The path of a report that is yet to be written.

    Raises
    ------
    HeteroError
        There is no such folder, it may not be written, or the path is one of a folder.
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
    """The data of a report that was written before: an HTML page, or its data as JSON.

    Raises
    ------
    HeteroError
        The file cannot be read, or is no report.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(text) if text.lstrip().startswith("{") else data_of(text)
    except (OSError, ValueError, HeteroError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise HeteroError(f"cannot compare with {path}: {what}; expected a report that was written before") from error
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        what = (
            "its data has no schema" if found is None else f"its schema is {found!r}, and this version reads {SCHEMA}"
        )
        raise HeteroError(f"cannot compare with {path}: {what}; expected a report that was written before")
    return dict(data)
