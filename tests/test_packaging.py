"""The scripts, the lock files and the configuration agree with each other."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = CONFIG["project"]["optional-dependencies"]
LOCKS = {
    path.stem: {
        canonicalize_name(line.name): line
        for line in map(Requirement, path.read_text().splitlines()[1:])
    }
    for path in (ROOT / "requirements").glob("*.lock")
}
LOCKED_EXTRAS = {
    "eval": ["eval"],
    "test": ["eval", "lm-eval", "test"],
    "cuda12": ["cuda12"],
}
BASH = shutil.which("bash")


def run(*command, **options):
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def locked_version(lock, name):
    (specifier,) = LOCKS[lock][name].specifier
    assert specifier.operator == "=="
    return specifier.version


def test_extras():
    assert sorted(EXTRAS) == ["cuda12", "cuda13", "eval", "lm-eval", "test", "train"]


def test_packages_are_importable_from_the_checkout():
    packages = CONFIG["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["ukv", "pallas_kernels", "models"]
    assert all((ROOT / package / "__init__.py").is_file() for package in packages)


def test_tools_that_judge_the_code_are_pinned():
    requirements = {r.name: r for r in map(Requirement, EXTRAS["test"])}
    for name in ("import-linter", "pyright", "ruff"):
        (specifier,) = requirements[name].specifier
        assert specifier.operator == "=="


@pytest.mark.parametrize("lock", LOCKED_EXTRAS)
def test_lock_names_no_host(lock):
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    assert "://" not in text
    assert not any(line.startswith("-") for line in text.splitlines())
    # `name @ address` and anything but one exact version.
    for name, requirement in LOCKS[lock].items():
        assert requirement.url is None
        assert locked_version(lock, name)


@pytest.mark.parametrize("lock", LOCKED_EXTRAS)
def test_lock_satisfies_pyproject(lock):
    wanted = CONFIG["project"]["dependencies"] + [
        line for extra in LOCKED_EXTRAS[lock] for line in EXTRAS[extra]
    ]
    for requirement in map(Requirement, wanted):
        version = locked_version(lock, canonicalize_name(requirement.name))
        assert version in requirement.specifier, f"{requirement=!s} {version=}"


def test_locks_agree():
    for name in set().union(*LOCKS.values()):
        versions = {locked_version(lock, name) for lock in LOCKS if name in LOCKS[lock]}
        assert len(versions) == 1, f"{name=} {versions=}"


def test_evaluation_on_a_cpu_downloads_no_cuda():
    unwanted = ("cuda", "nvidia", "triton")
    assert not [name for name in LOCKS["eval"] if any(u in name for u in unwanted)]


def test_weights_are_locked_without_what_their_package_asks_for():
    (group,) = CONFIG["dependency-groups"].values()
    for lock in ("eval", "test"):
        for requirement in map(Requirement, group):
            assert locked_version(lock, requirement.name) in requirement.specifier
        assert not {"llm", "llama-cpp-python"} & set(LOCKS[lock])


def test_tests_download_compilers_but_no_cuda_libraries():
    nvidia = [name for name in LOCKS["test"] if name.startswith("nvidia")]
    assert nvidia == ["nvidia-cuda-nvcc-cu12"]


def test_import_contract_lists_every_module():
    contracts = {c["id"]: c for c in CONFIG["tool"]["importlinter"]["contracts"]}
    listed = {layer.strip("()") for layer in contracts["modules"]["layers"]}
    present = {
        path.stem
        for path in (ROOT / "ukv").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    } - {"__init__"}
    assert present <= listed


@pytest.mark.parametrize("script", ["eval.sh", "lock.sh", "test.sh"])
def test_script_explains_itself(script):
    result = run(BASH, ROOT / "scripts" / script, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: bash scripts/{script}")


@pytest.fixture
def bare_checkout(tmp_path):
    """The scripts alone, in a place with a blank, and an environment with no Python."""
    checkout = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    (tmp_path / "bin").mkdir()
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home")}
    environment["PYENV_ROOT"] = str(tmp_path / "pyenv")
    return checkout, environment


@pytest.mark.parametrize("script", ["eval.sh", "test.sh", "lock.sh"])
def test_no_python_is_explained(bare_checkout, script):
    checkout, environment = bare_checkout
    result = run(BASH, checkout / "scripts" / script, env=environment)
    assert result.returncode != 0
    assert "ukv needs Python 3.12 or newer" in result.stderr
    for way_out in ("apt install python3.12", "pyenv install 3.12", "uv python"):
        assert way_out in result.stderr
    assert not (checkout / ".venv").exists()


def write_program(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{body}\n")
    path.chmod(0o755)


def find_python(checkout, environment):
    command = 'source "$0/scripts/_environment.sh" && find_python'
    result = run(BASH, "-c", command, checkout, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("bin/python3.13", "python3.13"),
        ("bin/python3", "python3"),
        ("pyenv/versions/3.13.1/bin/python3", "{}/pyenv/versions/3.13.1/bin/python3"),
    ],
)
def test_finder_passes_over_a_python_that_does_not_run(
    bare_checkout, tmp_path, place, found
):
    checkout, environment = bare_checkout
    write_program(tmp_path / "bin/python3.12", "exit 127")
    write_program(tmp_path / place, "exit 0")
    assert find_python(checkout, environment) == found.format(tmp_path)


def test_finder_asks_uv_last(bare_checkout, tmp_path):
    checkout, environment = bare_checkout
    managed = tmp_path / "managed/python3.12"
    write_program(managed, "exit 0")
    write_program(tmp_path / "bin/uv", f'[[ "$2" != find ]] || echo "{managed}"')
    assert find_python(checkout, environment) == str(managed)
