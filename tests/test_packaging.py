"""Distributions are complete: the sdist is the repository, the wheel is the package, and an installed wheel works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.paths import ROOT

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


class Distributions(NamedTuple):
    """Files of the repository, of the sdist, and of the wheels that are built from either, without a top folder."""

    tracked: set[str]
    sdist: set[str]
    wheel: set[str]
    wheel_of_sdist: set[str]
    wheel_path: Path


def call(*words: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def build(source: Path, kind: str, folder: Path) -> Path:
    """Build an sdist or a wheel as pip does, but with the installed setuptools, as there is no network."""
    folder.mkdir()
    call(sys.executable, "-c", BUILD, f"build_{kind}", str(folder), cwd=source)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout, which says which files belong to the repository")
    root = tmp_path_factory.mktemp("packaging")
    listed = call("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    tracked = {name for name in listed if (ROOT / name).is_file()}
    for name in tracked:
        (root / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / "checkout" / name)
    os.utime(root / "checkout/peft_mux/demo/__init__.py")  # the newest file, which build tools like best
    os.utime(root / "checkout/examples/demo/__init__.py", (1e9, 1e9))
    # What tests, compilers and notebooks leave in a checkout belongs into no distribution.
    for junk in ("tests/__pycache__/a.pyc", "peft_mux/__pycache__/a.pyc", "notebooks/.ipynb_checkpoints/a.ipynb"):
        (root / "checkout" / junk).parent.mkdir(exist_ok=True)
        (root / "checkout" / junk).touch()

    sdist = build(root / "checkout", "sdist", root / "sdist")
    with tarfile.open(sdist) as archive:
        top = os.path.commonpath(archive.getnames())
        sdist_files = {os.path.relpath(member.name, top) for member in archive.getmembers() if member.isfile()}
        archive.extractall(root / "unpacked", filter="data")
    wheels = [
        build(root / "unpacked" / top, "wheel", root / "second"),
        build(root / "checkout", "wheel", root / "first"),
    ]
    of_sdist, of_checkout = (set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels)
    return Distributions(tracked, sdist_files, of_checkout, of_sdist, wheels[1])


@pytest.mark.slow
def test_the_source_distribution_has_every_file_of_the_repository_and_nothing_else(built: Distributions) -> None:
    assert built.tracked - built.sdist == set()
    more = {name for name in built.sdist - built.tracked if not name.startswith("peft_mux.egg-info/")}
    assert more == {"PKG-INFO"}


@pytest.mark.slow
def test_a_wheel_has_the_package_with_the_demo_and_nothing_else(built: Distributions) -> None:
    demo = {name for name in built.tracked if name.startswith("examples/demo/")}
    package = {name for name in built.tracked if name.startswith("peft_mux/")}
    expected = package | {name.replace("examples/", "peft_mux/") for name in demo}
    assert "peft_mux/py.typed" in expected
    files = {name for name in built.wheel if ".dist-info/" not in name}
    assert files == expected
    facts = {name.partition(".dist-info/")[2] for name in built.wheel - files}
    assert built.wheel_of_sdist == built.wheel
    assert facts == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


@pytest.mark.slow
def test_the_dockerfile_copies_all_files_of_the_package(built: Distributions, tmp_path: Path) -> None:
    lines = (ROOT / "examples/launch/Dockerfile").read_text(encoding="utf-8").splitlines()
    (tmp_path / "image").mkdir()
    for *sources, target in (line.split()[1:] for line in lines if line.startswith("COPY ")):
        for source in sources:
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, tmp_path / "image" / target)
    assert set(zipfile.ZipFile(build(tmp_path / "image", "wheel", tmp_path / "out")).namelist()) == built.wheel


@pytest.mark.slow
def test_an_installed_wheel_runs_its_commands(built: Distributions, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    call(*pip, "--no-deps", "--no-index", "--target", str(installed), str(built.wheel_path), cwd=tmp_path)
    environment = {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = str(installed / "bin" / "peft-mux")
    version = built.wheel_path.name.split("-")[1]
    assert call(command, "--version", cwd=tmp_path, **environment) == f"peft-mux {version}\n"
    assert "--fast" in call(command, "demo", "--help", cwd=tmp_path, **environment)
    # An editable installation of the checkout would find its modules, too.
    code = (
        "import sys; sys.meta_path = [one for one in sys.meta_path if 'Editable' not in repr(one)]; "
        "import peft_mux, peft_mux.demo.run as run; print(peft_mux.__file__, run.__file__, peft_mux.Task.__name__)"
    )
    found = call(sys.executable, "-c", code, cwd=tmp_path, **environment).split()
    assert found == [str(installed / "peft_mux/__init__.py"), str(installed / "peft_mux/demo/run.py"), "Task"]
