"""Distribution of the project: workflows, the extras that pip installs, and how the library is cited."""

import io
import os
import re
import shlex
import tarfile
from pathlib import Path

import pytest
import yaml

import relax_hetero as rh
from relax_hetero.tools.cli import cli
from relax_hetero.tools.installation.packages import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text()
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)


def jobs_of(workflow):
    return yaml.safe_load(workflow.read_text())["jobs"]


def exists(command):
    """True if a command of a workflow is an existing file, target of make or command of the library."""
    program, *arguments = shlex.split(command)
    if program == "make":
        return all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in arguments)
    if program == "relax-hetero":
        return arguments == ["--version"] or arguments[0] in cli.commands
    if program == "python":
        return all((ROOT / word[1:]).is_file() for word in arguments if word.startswith("@"))
    return program in ("pip", "sudo") or os.access(ROOT / program, os.X_OK)


def test_workflows_are_found():
    assert [workflow.name for workflow in WORKFLOWS] == ["arm.yml", "ci.yml", "docs.yml", "wheels.yml"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_exists(workflow):
    for job in jobs_of(workflow).values():
        assert set(job.get("needs", "").split()) <= set(jobs_of(workflow))
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert "uses" not in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
            assert "run" not in step or exists(step["run"]), step


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read(workflow):
    """None needs a secret, and none publishes."""
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    assert "secrets" not in workflow.read_text()


def test_each_python_is_tried():
    _, ci, _, wheels = map(jobs_of, WORKFLOWS)
    for job in (ci["test"], wheels["install"]):
        assert job["strategy"]["matrix"]["python"] == PYTHONS
    assert {"run": ".ci/run"} in ci["test"]["steps"]
    assert f'requires-python = ">={PYTHONS[0]},<3.{int(PYTHONS[-1][2:]) + 1}"' in PROJECT
    assert ci["systems"]["strategy"]["matrix"]["python"] == [PYTHONS[0], PYTHONS[-1]]


def test_other_systems_run_tests_that_exist():
    assert all((ROOT / line).exists() for line in (ROOT / "release" / "systems.txt").read_text().splitlines())


def test_an_image_is_built_by_the_tested_script():
    """Only the script installs anything, and the image has its command."""
    lines = (ROOT / "release" / "Dockerfile").read_text().splitlines()
    steps = [line for line in lines if line.startswith("RUN") and "pip" in line]
    (folder,) = re.findall(r"^RUN /checkout/release/install.sh (\S+) ", "\n".join(lines), re.MULTILINE)
    assert not steps and f'ENTRYPOINT ["{folder}/bin/relax-hetero"]' in lines


def test_a_source_distribution_depends_on_its_files_only(tmp_path):
    """Neither times, owners and permissions nor the order of the files matter."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("build_packages", ROOT / "release" / "build.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    archives = []
    for number, names in enumerate((["a", "tool"], ["tool", "a"])):
        archive = tmp_path / f"{number}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for name in names:
                entry = tarfile.TarInfo(f"part/{name}")
                entry.mtime, entry.uid, entry.size = 1000 + number, number, 4
                entry.mode = (0o744, 0o755)[number] if name == "tool" else (0o600, 0o664)[number]
                tar.addfile(entry, io.BytesIO(name.ljust(4).encode()))
        builder.normalize(archive, 1234)
        archives.append(archive.read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(tmp_path / "0.tar.gz") as tar:
        assert [(m.name, m.mode, m.mtime) for m in tar] == [("part/a", 0o644, 1234), ("part/tool", 0o755, 1234)]


def test_the_library_is_cited_by_its_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == rh.__version__
    assert f'license = "{citation["license"]}"' in PROJECT


def extras():
    """The packages of each extra, without their versions."""
    lists = PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[project.")[0]
    pairs = re.findall(r"^([\w-]+) = \[\n(.*?)^\]", lists, re.MULTILINE | re.DOTALL)
    return {extra: re.findall(r'^    "([\w-]+)', packages, re.MULTILINE) for extra, packages in pairs}


def test_the_page_names_each_extra_and_its_packages():
    page = (ROOT / "docs" / "install.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| .* \| ([^|]*) \|$", page, re.MULTILINE))
    (rest,) = re.findall(r"^The extras (.*) are for changing the library", page, re.MULTILINE)
    documented = {extra: re.findall(r"`([\w-]+)`", packages) for extra, packages in rows.items()}
    developers = re.findall(r"`([\w-]+)`", rest)
    assert list(documented) == list(EXTRAS)
    assert documented == {extra: packages for extra, packages in extras().items() if extra not in developers}
    assert set(documented) | set(developers) == set(extras())
