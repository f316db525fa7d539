"""What is published: the source distribution, and the wheel that is built from it as pip builds it."""

import configparser
import io
import pkgutil
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import nsa_dcp

ROOT = Path(__file__).parents[1]
PACKAGES = {"nsa_dcp": ROOT / "nsa_dcp", "nsa_dcp_kernels": ROOT / "kernels" / "nsa_dcp_kernels"}
INFO = f"nsa_dcp-{nsa_dcp.__version__}.dist-info"
# What is read beside modules: a table of sglang's flags, a tokenizer, and the marks that say that there are types.
READ = {
    "nsa_dcp/sglang_plugin/admission/reading/launch_flags.json",
    "nsa_dcp/hf/tiny_tokenizer.json",
    "nsa_dcp/py.typed",
    "nsa_dcp_kernels/py.typed",
}
# Of a checkout alone: nothing there is read by a test that runs without git.
NOT_IN_THE_SDIST = re.compile(r"\.ci/|\.github/|\.pre-commit-config\.yaml$")
# Code and pages; a report of megabytes, or a picture, belongs elsewhere.
MOST_BYTES = {"wheel": 1_000_000, "sdist": 2_000_000}


def build(target: str, source: Path, folder: Path) -> Path:
    """Build one distribution with hatchling in a process of its own, as a build frontend does."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def read_from_wheel(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{INFO}/{name}").decode()


def files_of(*folders: Path) -> list[Path]:
    """Files of a checkout, without what git ignores; elsewhere every file but caches."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in found if "__pycache__" not in path.parts]


def test_the_wheel_has_both_packages_with_their_data_and_nothing_else(wheel):
    installed = {name for name in names_in_wheel(wheel) if not name.startswith(f"{INFO}/")}
    assert installed == {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in files_of(folder)
    }
    assert {name for name in installed if not name.endswith(".py")} == READ


def test_the_wheel_installs_the_command_and_the_plugin(wheel):
    points = configparser.ConfigParser()
    points.read_string(read_from_wheel(wheel, "entry_points.txt"))
    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {"nsa-dcp": "nsa_dcp.cli:main"},
        "sglang.srt.plugins": {"nsa_dcp": "nsa_dcp.sglang_plugin.plugin:register"},
    }
    for section in points.sections():
        assert all(callable(pkgutil.resolve_name(target)) for target in points[section].values())


def test_the_wheel_says_its_version_and_licence(wheel):
    about = HeaderParser().parse(io.StringIO(read_from_wheel(wheel, "METADATA")))
    assert (about["Name"], about["Version"], about["License-Expression"]) == (
        "nsa-dcp",
        nsa_dcp.__version__,
        "Apache-2.0",
    )
    assert wheel.name == f"nsa_dcp-{nsa_dcp.__version__}-py3-none-any.whl"
    assert f"{INFO}/licenses/LICENSE" in names_in_wheel(wheel)
    assert f"## {nsa_dcp.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_sdist_has_what_its_own_tests_read(sdist):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    ours = {path.relative_to(ROOT).as_posix() for path in files_of(ROOT)}
    assert members - {"PKG-INFO"} == {name for name in ours if not NOT_IN_THE_SDIST.match(name)}


@pytest.mark.parametrize("kind", MOST_BYTES)
def test_a_distribution_stays_small(kind, request):
    assert request.getfixturevalue(kind).stat().st_size <= MOST_BYTES[kind]
