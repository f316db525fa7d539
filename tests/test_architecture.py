"""What keeps the tree small, light and layered, checked by machine."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"nsa_dcp": ROOT / "nsa_dcp", "nsa_dcp_kernels": ROOT / "kernels" / "nsa_dcp_kernels"}
# What may load a model library, a server or a compiler: everything else must stay light.
HEAVY = ("nsa_dcp.hf", "nsa_dcp.testing", "nsa_dcp_kernels._triton")
_BACKENDS = ("backend", "cp_backend", "row_backend", "wired_backend")
HEAVY += tuple(f"nsa_dcp.sglang_plugin.attention.{name}" for name in _BACKENDS)
HEAVY += ("nsa_dcp.sglang_plugin.selection.sharded_key_cache",)
LIGHT_PACKAGES = {"nsa_dcp", "nsa_dcp_kernels", "torch", "numpy"}
MAX_LINES = 400
# A folder is a role: more modules than this are several roles, but where all are alike, an op or a test each.
MAX_MODULES = 15
ROLES = ("nsa_dcp", "scripts")
# What a person reads in a checkout, and a plot; what machines write by the megabyte belongs elsewhere.
MAX_BYTES = 200_000
SHAPELESS = re.compile(r"^(utils?|helpers?|common|core|misc|shared|base)(\.py)?$")


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def modules() -> dict[str, Path]:
    """Every module of both packages, by dotted name."""
    found = {}
    for package, directory in SOURCES.items():
        for path in sorted(directory.rglob("*.py")):
            inner = path.relative_to(directory).with_suffix("").parts
            found[".".join([package, *(part for part in inner if part != "__init__")])] = path
    return found


def imported_by(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever the statement stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_no_python_file_is_longer_than_400_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in tracked_files() if path.suffix == ".py"}
    assert lengths
    too_long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert too_long == {}


def test_no_folder_has_more_modules_than_a_person_surveys():
    counts: dict[str, int] = {}
    for path in tracked_files():
        inner = path.relative_to(ROOT)
        if path.suffix == ".py" and path.stem != "__init__" and inner.parts[0] in ROLES:
            counts[str(inner.parent)] = counts.get(str(inner.parent), 0) + 1
    assert {"nsa_dcp/planning", "nsa_dcp/sglang_plugin/admission", "scripts/served_checks"} <= set(counts)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_no_tracked_file_is_large():
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked_files()}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > MAX_BYTES} == {}
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert "id: check-added-large-files" in hooks and f"--maxkb={MAX_BYTES // 1000}" in hooks


def test_every_name_says_what_is_inside():
    nameless = {
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if any(SHAPELESS.match(part) for part in path.relative_to(ROOT).parts)
    }
    assert nameless == set()


def test_kernels_is_a_source_root_and_not_a_package():
    """Another project owns the name `kernels`."""
    assert (ROOT / "kernels" / "nsa_dcp_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_tracked_file_names_a_path_of_somebodys_machine():
    absolute = re.compile(rb"(?<![\w.~/:-])/(?:home|root|Users|work|workspace|mnt)/\w")
    named = {str(path.relative_to(ROOT)) for path in tracked_files() if absolute.search(path.read_bytes())}
    assert named == set()


def test_importing_nsa_dcp_loads_nothing_but_itself():
    ran = run_python("import sys, torch; before = set(sys.modules); import nsa_dcp; print(*set(sys.modules) - before)")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["nsa_dcp"]


def test_light_modules_load_neither_models_nor_servers_nor_compilers():
    """Told by what is loaded, not by time: beyond torch and the standard library, our own modules alone."""
    light = [name for name in modules() if not name.startswith(HEAVY)]
    assert {"nsa_dcp.tp_dcp", "nsa_dcp.cp_dcp", "nsa_dcp.launcher", "nsa_dcp.cli", "nsa_dcp_kernels"} <= set(light)
    code = f"""
import importlib, json, sys
import torch
loaded, blame = set(sys.modules), {{}}
for name in {light!r}:
    importlib.import_module(name)
    added = {{module.split('.')[0] for module in set(sys.modules) - loaded}}
    loaded = set(sys.modules)
    blame[name] = sorted(added - set(sys.stdlib_module_names) - {LIGHT_PACKAGES!r})
print(json.dumps({{name: added for name, added in blame.items() if added}}))
"""
    ran = run_python(code)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {}


def test_process_groups_are_known_to_comm_alone():
    """Everybody else is handed a group; the test kit may make its own."""
    users = {
        name
        for name, path in modules().items()
        if any(
            imported == "torch.distributed" or imported.startswith("torch.distributed.")
            for imported in imported_by(path)
        )
        or re.search(r"\btorch\.distributed\b", path.read_text())
    }
    assert "nsa_dcp.comm" in users
    assert {name for name in users if not name.startswith("nsa_dcp.testing")} == {"nsa_dcp.comm"}


def test_import_contracts_are_kept():
    pytest.importorskip("importlinter")
    ran = run_python("from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])")
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr
    assert re.search(r"Contracts: \d+ kept, 0 broken", ran.stdout)
