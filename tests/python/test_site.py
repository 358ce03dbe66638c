"""The site that ``make docs`` builds: its pages are in the navigation, lead from one to the next, and are up to date.

``make docs`` checks all links once more, with the ids that the site's pages have.
"""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

import relax_hetero as rh

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NEXT = re.compile(r"^\*\*Next:\*\* .*\]\(([^)#]+)(?:#[\w-]+)?\).*\.$", re.MULTILINE)


def pages():
    """Pages in the order of the navigation in mkdocs.yml."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r"^ +- [^:\n]+: (\S+\.\w+)$", navigation, flags=re.MULTILINE)


def test_every_page_is_in_the_navigation():
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    listed = pages()
    assert len(listed) == len(set(listed))
    assert written <= set(listed)
    assert [page for page in listed if not (DOCS / page).exists()] == []


def text_of(page):
    """A page without the settings that a notebook has above it."""
    return re.sub(r"\A---\n.*?\n---\n+", "", (DOCS / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("place", range(len(pages())), ids=pages())
def test_each_page_leads_to_the_next(place):
    """The last line of a page; the last page leads home. Notebooks end as they like, and may be passed over."""
    page, *following = [*pages()[place:], *pages()[:place]]
    if not page.endswith(".md"):
        return
    assert text_of(page).rstrip().splitlines()[-1].startswith("**Next:**"), f"docs/{page} needs a last line **Next:**"
    (link,) = NEXT.findall(text_of(page))
    leads_to = os.path.relpath((DOCS / page).parent / link, DOCS)
    assert leads_to in {following[0], next(other for other in following if other.endswith(".md"))}


def test_each_page_begins_with_a_title_and_a_sentence():
    for page in pages():
        if page.endswith(".md"):
            title, _, first, *_ = text_of(page).splitlines()
            assert title.startswith("# "), page
            assert first[0] in "`*[" or first[0].isalpha(), f"docs/{page} begins with {first!r}"


def errors_in_code():
    """Sources of the package with string literals joined across lines and placeholders replaced by three dots."""
    sources = (path.read_text() for path in (ROOT / "python" / "relax_hetero").rglob("*.py"))
    joined = re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(sources))
    return re.sub(r"\{[^{}\n]*\}", "...", joined)


def test_errors_that_the_page_on_limits_quotes_exist():
    """A row of the page names the error's class and quotes words of its message."""
    named = re.findall(r'`rh\.(\w+)`: "([^"]+)"', (DOCS / "reference" / "limits.md").read_text())
    texts = errors_in_code()
    assert len(named) > 30
    for error, words in named:
        assert issubclass(getattr(rh, error), rh.HeteroError)
        assert words in texts, f"no error says {words!r}"


def test_questions_name_every_class_of_errors():
    page = (DOCS / "howto" / "model_refused.md").read_text()
    classes = {name for name in rh.__all__ if name.endswith("Error")} - {"HeteroError"}
    assert {name for name in classes if f"`rh.{name}`" not in page} == set()


@pytest.mark.parametrize("script", ["tools/api_pages.py", "pictures/packages_picture.py"])
def test_generated_pages_are_current(script, monkeypatch, capsys):
    """On failure: run the script with --write."""
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    assert runpy.run_path(str(DOCS / script))["main"]() == 0, capsys.readouterr().out


def test_pictures_of_reports_are_made_by_their_script_and_shown():
    names = {f"report_{name}.png" for name in runpy.run_path(str(DOCS / "tools" / "report_images.py"))["TABLE"]}
    files = list((DOCS / "images").iterdir())
    assert {path.name for path in files} == names
    assert max(path.stat().st_size for path in files) < 300_000
    page = (DOCS / "guides" / "reports.md").read_text()
    assert {name for name in names if f"](../images/{name})" not in page} == set()


def test_the_home_page_has_the_version_and_the_repository(monkeypatch):
    assert "\n<!-- release -->\n" in (DOCS / "index.md").read_text()
    release = runpy.run_path(str(DOCS / "tools" / "hooks.py"))["release"]
    monkeypatch.setenv("REPOSITORY_URL", "https://host.example/owner/name")
    assert release() == f"Version {rh.__version__} · [repository](https://host.example/owner/name)"
    monkeypatch.delenv("REPOSITORY_URL")
    assert "README.md" in release()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_figures_of_first_pages_are_on_the_page_of_all_figures(page):
    (table,) = re.findall(r"^## Figures\n.*?^(\|.*?)\n\n", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    cells = " ".join(cell for row in table.splitlines()[2:] for cell in row.split("|")[2:6])
    numbers = re.findall(r"\d[\d.,]*", cells)
    everything = (DOCS / "reference" / "performance.md").read_text()
    assert len(numbers) > 15
    assert [number for number in numbers if not re.search(rf"(?<![\d.,]){re.escape(number)}", everything)] == []


def test_the_site_loads_nothing_from_elsewhere():
    """Checks the settings only; the hooks check each page that was built."""
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "\n  font: false\n" in settings
    assert "http" not in settings


def test_a_device_of_your_own_takes_sixty_lines():
    (program,) = re.findall(r"^```python\n(.*?)^```", text_of("tutorials/own_device.md"), re.MULTILINE | re.DOTALL)
    assert program.count("\n") <= 60
