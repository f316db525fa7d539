"""What an installed nsa-dcp has: every module, and the files that modules read."""

import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"nsa_dcp": ROOT / "nsa_dcp", "nsa_dcp_kernels": ROOT / "kernels" / "nsa_dcp_kernels"}
# What is read beside modules: a table of sglang's flags, a tokenizer, and the marks that say that there are types.
READ = {
    "nsa_dcp/sglang_plugin/admission/reading/launch_flags.json",
    "nsa_dcp/hf/tiny_tokenizer.json",
    "nsa_dcp/py.typed",
    "nsa_dcp_kernels/py.typed",
}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Names of the files in the wheel."""
    wheels = pytest.importorskip("hatchling.builders.wheel")
    wheel = next(wheels.WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel"))))
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_files_that_modules_read_are_in_the_wheel(shipped):
    assert shipped >= READ


def test_the_wheel_has_both_packages_whole_and_nothing_else(shipped):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    kept = set()
    # What git ignores is of this machine; what it does not know yet is somebody's work.
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for package, folder in SOURCES.items():
        listed = subprocess.run(list_files, cwd=folder, capture_output=True, text=True, check=True).stdout
        kept |= {f"{package}/{name}" for name in listed.split("\0") if name and (folder / name).is_file()}
    packed = {name for name in shipped if not name.split("/")[0].endswith(".dist-info")}
    assert packed - kept == set(), "beside the packages"
    assert kept - packed == set(), "left out"


def test_every_file_that_is_no_module_is_read_by_something(shipped):
    """So that `READ` stays the list of them."""
    others = {name for name in shipped if not name.endswith(".py") and not name.split("/")[0].endswith(".dist-info")}
    assert others == READ
