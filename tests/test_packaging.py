"""What a user installs and types: the wheel, the pins, the lazy package and the scripts."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import maxdiloco
from maxdiloco import errors
from maxdiloco.flags import config

ROOT = pathlib.Path(__file__).parent.parent


def run(command, **kwargs):
    """A finished process with its text; no test here may wait for a network."""
    return subprocess.run(
        [str(part) for part in command], text=True, capture_output=True, timeout=120, **kwargs
    )


def python(code, **kwargs):
    return run([sys.executable, "-c", code], **kwargs)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, as setuptools leaves build folders in its source."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("maxdiloco", "configs"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder]
    built = run([*pip, *options, folder / "source"])
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def requirements(wheel):
    """The requirements of the wheel, those of its extras too."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    return [Requirement(text) for text in metadata.get_all("Requires-Dist")]


@pytest.fixture(scope="module")
def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_wheel_holds_every_module_and_every_config(wheel):
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "maxdiloco").rglob("*.py")}
    configs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yml")}
    expected |= {f"maxdiloco/{name}" for name in configs}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert archive.read("maxdiloco/configs/base.yml") == (
            (ROOT / "configs/base.yml").read_bytes()
        )
    assert "maxdiloco/configs/models/tiny.yml" in held
    assert held == expected


def test_an_installed_wheel_finds_its_configs_from_anywhere(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    away = tmp_path / "away"
    away.mkdir()
    code = (
        "import maxdiloco; from maxdiloco.flags import config; print(maxdiloco.__file__); "
        "print(config.load(['model_name=35m'], {}).model_name)"
    )
    done = python(code, cwd=away, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "site/maxdiloco/__init__.py"), "35m"]


def test_each_console_command_names_a_function_without_arguments(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        text = archive.read(name).decode()
    commands = dict(re.findall(r"^(maxdiloco-\w+) = maxdiloco\.(\w+):cli$", text, re.M))
    programs = ("train", "generate", "evaluate", "prepare", "tokenizer")
    assert commands == {f"maxdiloco-{program}": program for program in programs}
    for module in commands.values():
        tree = ast.parse((ROOT / f"maxdiloco/{module}.py").read_text(encoding="utf-8"))
        (cli,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "cli"]
        assert ast.unparse(cli.args) == ""


def test_every_requirement_has_an_exact_pin_inside_its_range(requirements, pins):
    assert {name for r in requirements for name in r.extras} == {"epath", "tpu", "cuda12"}
    named = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in requirements:
        assert requirement.specifier.contains(named[canonicalize_name(requirement.name)])


def test_pins_are_exact_versions_and_nothing_else(pins):
    assert pins["jax"] == "0.10.2"
    wrong = {name: v for name, v in pins.items() if not re.fullmatch(r"[0-9][0-9a-z.]*", v)}
    assert wrong == {}


def test_the_pinned_libtpu_is_the_one_jax_names(pins):
    """jax's extra `tpu` names one libtpu for each release."""
    named = [Requirement(text) for text in requires("jax")]
    (libtpu,) = [requirement for requirement in named if requirement.name == "libtpu"]
    assert libtpu.specifier.contains(pins["libtpu"])


def test_the_package_loads_jax_only_for_the_class():
    code = "import maxdiloco, maxdiloco.flags.config, sys; print('jax' in sys.modules); {}; {}"
    late = code.format("maxdiloco.DiLoCo, maxdiloco.Stacked", "print('jax' in sys.modules)")
    done = python(late, cwd=ROOT)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_the_package_exports_the_class_and_names_what_it_lacks():
    assert maxdiloco.DiLoCo.__module__ == "maxdiloco.engine.diloco"
    assert maxdiloco.Stacked.__module__ == "maxdiloco.diloco.fragments"
    names = [maxdiloco.__getattr__(name).__name__ for name in maxdiloco.__all__]
    assert names == maxdiloco.__all__
    with pytest.raises(AttributeError, match=r"'Diloco': it exports Checkpointer, .*\. Import"):
        _ = maxdiloco.Diloco


def test_the_quickstart_config_is_two_slices_of_diloco():
    cfg = config.load([str(ROOT / "configs/quickstart.yml")], {})
    assert (cfg.run_name, cfg.hardware, cfg.enable_diloco) == ("quickstart", "cpu", True)
    assert (cfg.dcn_diloco_parallelism, cfg.ici_fsdp_parallelism) == (2, 2)
    assert cfg.eval_interval > 0 and cfg.steps % cfg.diloco_sync_period == 0


@pytest.fixture
def fake_venv(tmp_path):
    """An environment whose Python writes down how it was called, and does nothing."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").touch()
    fake = tmp_path / "venv/bin/python"
    fake.write_text(f'#!/bin/sh\nprintf "%s|" "$@" >>{tmp_path}/log; echo >>{tmp_path}/log\n')
    fake.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "runs/quickstart"),
        (["steps=3", "run_name=a b", "base_output_directory=/x"], "/x/a b"),
    ],
)
def test_quickstart_trains_and_lets_the_model_write(fake_venv, arguments, folder):
    script = ["bash", ROOT / "scripts/quickstart.sh", *arguments]
    done = run(script, cwd="/", env={**os.environ, "MAXDILOCO_VENV": str(fake_venv / "venv")})
    assert done.returncode == 0, done.stderr
    train, generate = (fake_venv / "log").read_text(encoding="utf-8").splitlines()[-2:]
    assert train == "|".join(["-m", "maxdiloco.train", "configs/quickstart.yml", *arguments, ""])
    assert generate == f"-m|maxdiloco.generate|{folder}|prompt=def |"


def test_without_a_python_the_scripts_say_what_to_install(tmp_path):
    """Names on PATH that hold no Python, as version managers leave them, do not count."""
    for name in ("bash", "dirname", "ls"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "python3").write_text("#!/bin/bash\nexit 127\n")
    (tmp_path / "python3").chmod(0o755)
    script = ["bash", ROOT / "scripts/make_venv.sh", tmp_path / "venv"]
    done = run(script, env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert re.search(r"no Python 3\.11 or newer on PATH .*Install one, or set", done.stderr)


def test_a_python_that_does_not_run_is_named(tmp_path):
    script = ["bash", ROOT / "scripts/make_venv.sh", tmp_path / "venv"]
    done = run(script, env={**os.environ, "MAXDILOCO_PYTHON": "/nowhere/python"})
    assert done.returncode == 2
    assert re.search(r"MAXDILOCO_PYTHON=/nowhere/python is not .*Set it to one", done.stderr)


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = run(["bash", ROOT / "scripts/make_venv.sh", tmp_path])
    assert done.returncode == 2
    assert re.search(f"{tmp_path} exists and is not .*Name another folder", done.stderr)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_checks_without_an_environment_say_how_to_make_one(tmp_path):
    script = ["bash", ROOT / "scripts/check.sh"]
    done = run(script, env={**os.environ, "MAXDILOCO_VENV": str(tmp_path / "none")})
    assert done.returncode == 2
    assert re.search(r"no ruff in .*/none\. Make the environment with", done.stderr)


XPK = {
    "CLUSTER": "c", "PROJECT": "p", "ZONE": "z", "TPU_TYPE": "v5litepod-16", "NUM_SLICES": "2",
    "IMAGE": "i", "OUTPUT": "gs://bucket/runs",
}  # fmt: skip


def xpk_run(arguments, **environment):
    script = ["bash", ROOT / "scripts/xpk_run.sh", *arguments]
    return run(script, env={"PATH": os.environ["PATH"], **environment})


def test_xpk_gets_the_training_command_whole(tmp_path):
    """xpk hands --command to a shell in the pod: what arrives there is what was written."""
    (tmp_path / "xpk").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "xpk").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = xpk_run(["first", "my.yml", "mlp_activations=[silu, linear]"], **XPK | {"PATH": path})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"workload", "create", "--num-slices=2", "--workload=first"} <= set(lines)
    codes = f"{errors.LostPeerError.exit_code},{errors.SaveError.exit_code}"
    assert f"--restart-on-exit-codes={codes}" in lines
    (command,) = [line for line in lines if line.startswith("--command=")]
    assert command.startswith("--command=exec python "), "SIGTERM has to reach Python itself"
    spoken = command.replace("--command=exec python", "printf '%s|'")
    in_pod = run(["bash", "-c", spoken])
    assert in_pod.stdout == (
        "-m|maxdiloco.train|my.yml|mlp_activations=[silu, linear]|hardware=tpu|"
        "base_output_directory=gs://bucket/runs|run_name=first|"
    )


def test_xpk_dry_run_starts_nothing():
    done = xpk_run(["first"], **XPK, DRY_RUN="1")
    assert done.returncode == 0
    assert done.stdout.startswith("xpk workload create --cluster=c --project=p ")
    assert "--storage" not in done.stdout


def test_xpk_mounts_the_storage_with_the_text():
    done = xpk_run(["first", "dataset_path=/text"], **XPK, DRY_RUN="1", STORAGE="my-text")
    assert done.stdout.rstrip().endswith(" --storage=my-text")


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ([], {}, r"the first argument is the run's name, not ''\. usage: bash"),
        (["steps=3"], {}, r"the run's name, not 'steps=3'\. usage: bash"),
        (["first"], {"ZONE": ""}, r"ZONE is not set\. Set it, as in: ZONE="),
        (["first"], {"OUTPUT": "runs"}, r"OUTPUT=runs is not on gs://.*Use gs://"),
        (["first", "run_name=b"], {}, r"run_name=b is set by this script.*Leave it out"),
        (["first", "dataset_path=gs://b/t"], {}, r"dataset_path=gs://b/t is an address\. Mount"),
        (["first"], {}, r"xpk is not on PATH\. Install it"),
    ],
)
def test_a_launch_that_cannot_work_is_refused(arguments, changes, message):
    done = xpk_run(arguments, **XPK | changes)
    assert done.returncode == 2
    assert re.search(message, done.stderr)


def test_the_image_copies_only_what_exists():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"(?m)^COPY (.*)$", text) for name in line.split()[:-1]]
    assert {"maxdiloco", "configs", "constraints.txt", "setup.py"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert [name for name in copied if f"!{name}" not in ignored] == []
