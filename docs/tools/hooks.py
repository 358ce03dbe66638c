"""Hooks of MkDocs: links out of docs/, the release, and the texts of passes.

Pages link to files of the checkout by relative paths, so that the links work where the checkout is browsed. On the
site, a Markdown page outside of docs/ becomes a page below ``repository/``; other files' names are shown as code.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^()#\s]*)(#[^()\s]*)?\)")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"^## (\S+)\n\n.*\n\n::: (\S+)$", re.MULTILINE)
"""A name on a page of docs/api/: heading, summary, and the path of the docstring, which begins with the summary."""
PASS = re.compile(r"<!-- pass (\w+) -->")
LOADS = re.compile(
    r'<(?:script|img|iframe|link rel="(?:stylesheet|preconnect|preload)")[^>]*(?:src|href)="(?:https?:)?//[^"]*'
)
OUTSIDE = "repository/"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside of docs/ that links lead to, directly or through other such pages."""
    from mkdocs.structure.files import File

    pending = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    pages = set(pending)
    while pending:
        page = pending.pop()
        for target in links_of(page):
            if target not in pages and target.endswith(".md") and (ROOT / target).is_file():
                pages.add(target)
                pending.append(target)
                if not target.startswith("docs/"):
                    files.append(File.generated(config, OUTSIDE + target, content=(ROOT / target).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """The page with links converted for the site, and with the texts of passes."""
    uri = page.file.src_uri
    place = uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"
    markdown = NAME.sub(lambda match: f"## {match[1]}\n\n{signature(match[1], match[2])}::: {match[2]}", markdown)
    markdown = PASS.sub(lambda match: pass_text(match[1]), markdown).replace("<!-- release -->", release())

    def replaced(match: re.Match[str]) -> str:
        picture, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        there = path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path
        if there.endswith(".py") or files.get_file_from_path(there) is None:
            return match[0] if not (ROOT / path).exists() else text if "`" in text else f"`{text}`"
        return f"{picture}[{text}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor})"

    return outside_code(LINK, replaced, markdown)


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Convert links of notebooks, which MkDocs does not convert."""

    def replaced(match: re.Match[str]) -> str:
        there = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), match[1]))
        file = files.get_file_from_path(there)
        if file is None:
            logging.getLogger("mkdocs.hooks").warning("%s links to %s, not a page", page.file.src_uri, match[1])
            return match[0]
        return f'href="{file.url_relative_to(page.file)}{match[2] or ""}"'

    return re.sub(r'href="(?!\w+:)([^"#]+\.md)(#[^"]*)?"', replaced, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The unchanged page; warns if it would load anything from another host, which ``--strict`` makes an error."""
    for url in LOADS.findall(output):
        logging.getLogger("mkdocs.hooks").warning("%s loads from another host: %s", page.file.src_uri, url)
    return output


def links_of(page: str) -> list[str]:
    """Files of the checkout that a page links to."""
    text = CODE.sub("", (ROOT / page).read_text())
    folder = posixpath.dirname(page)
    return [posixpath.normpath(posixpath.join(folder, target)) for _, _, target, _ in LINK.findall(text) if target]


def outside_code(pattern: re.Pattern[str], replacement: Any, text: str) -> str:
    """`text` with the pattern replaced outside of code: links may contain code, code does not contain links."""
    fences = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
    parts, end = [], 0
    for fence in fences.finditer(text):
        parts += [pattern.sub(replacement, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, pattern.sub(replacement, text[end:])])


def release() -> str:
    """The version, and the repository of the environment variable ``REPOSITORY_URL``."""
    import relax_hetero as rh

    url = os.environ.get("REPOSITORY_URL", "")
    return f"Version {rh.__version__} · " + (f"[repository]({url})" if url else "[README](../README.md)")


def pass_text(name: str) -> str:
    """The text of a pass as in ``help``, in Markdown."""
    import relax_hetero as rh

    text = rh.transform.find_pass(name).text
    _, _, text = text.partition("\n\n")  # the summary is on the page
    text = re.sub(r"\n\n?Returns\n-+\ntvm\.transform\.Pass", "", text)
    text = re.sub(r"^(\w[\w ]*)\n-{3,}$", r"**\1**\n", text, flags=re.MULTILINE)
    return literal_blocks(definitions(text))


def signature(name: str, place: str) -> str:
    """A block with the signature of a public name; none for errors, and for classes that users do not construct."""
    module, _, attribute = place.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    if inspect.isclass(value) and (issubclass(value, Exception) or getattr(value, "_is_protocol", False)):
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # not Python code
        return ""
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    call = str(inspect.Signature(plain))
    if len(name + call) > 90:
        call = "(\n    " + ",\n    ".join(str(inspect.Signature([each]))[1:-1].rstrip("/, ") for each in plain) + ",\n)"
    return f"```python\n{name}{call}\n```\n\n"


def definitions(text: str) -> str:
    """Convert entries of numpydoc sections, ``name : type`` and indented lines, to a list."""
    return re.sub(r"^(\w+) : (.*)\n((?:    .*\n?|\n(?=    ))+)", _entry, text, flags=re.MULTILINE)


def _entry(match: re.Match[str]) -> str:
    return f"- `{match[1]}` : *{match[2].strip()}*: {' '.join(match[3].split())}\n"


def literal_blocks(text: str) -> str:
    """Convert blocks of code after ``::`` to fenced blocks."""
    block = re.compile(r"^( *)(.*)::\n\n((?:\1 +\S.*\n?|\n)+)", re.MULTILINE)

    def fenced(match: re.Match[str]) -> str:
        indent, body = match[1], match[3].rstrip("\n").splitlines()
        depth = min(len(line) - len(line.lstrip()) for line in body if line.strip())
        lines = "\n".join(indent + line[depth:] if line.strip() else "" for line in body)
        return f"{indent}{match[2]}:\n\n{indent}```python\n{lines}\n{indent}```\n\n"

    return block.sub(fenced, text)
