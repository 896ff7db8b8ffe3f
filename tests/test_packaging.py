"""What a user installs and types: the wheel, the pins, the lazy package, the scripts, the image."""

import ast
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, requires, version

import pydantic
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import maxdiloco
from maxdiloco.__main__ import programs_of
from maxdiloco.config import config

ROOT = pathlib.Path(__file__).parent.parent
SHOWN = (".html", ".css", ".js")  # files of the report's page


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


def test_the_wheel_holds_every_module_config_and_console_command(wheel):
    package, configs = ROOT / "maxdiloco", ROOT / "configs"
    page = {path for path in (package / "report").rglob("*.*") if path.suffix in SHOWN}
    assert len(page) == 6
    page |= {path for path in package.rglob("*") if path.suffix in (".py", ".yml", ".csv")}
    expected = {path.relative_to(ROOT) for path in {*page, package / "report/static/uplot/LICENSE"}}
    expected |= {"maxdiloco" / path.relative_to(ROOT) for path in configs.rglob("*.*")}
    with zipfile.ZipFile(wheel) as archive:
        held = {pathlib.Path(name) for name in archive.namelist() if ".dist-info/" not in name}
        base = archive.read("maxdiloco/configs/base.yml")
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        entries = archive.read(name).decode()
    assert base == (configs / "base.yml").read_bytes()
    assert held == expected
    commands = dict(re.findall(r"^(maxdiloco-[\w-]+) = maxdiloco\.([\w.]+):main$", entries, re.M))
    programs = programs_of(package)
    modules = {n: f"{n}.__main__" if (package / n).is_dir() else n for n in programs}
    assert commands == {f"maxdiloco-{n.replace('_', '-')}": m for n, m in modules.items()}
    models = re.findall(r"^\[lm_eval.models\]\nmaxdiloco = (.*)$", entries, re.M)
    assert models == ["maxdiloco.huggingface.harness:HarnessModel"]
    for module in modules.values():  # which takes no arguments then, and ends the process
        path = package / f"{module.replace('.', '/')}.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        (main,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
        assert list(map(ast.unparse, main.decorator_list)) == ["guarded"]


def interpreter(version):
    """A Python of this version that runs, or None."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for path in filter(None, found):
        done = run([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        if done.stdout.strip() == version:
            return path
    return None


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_another_python_compiles_every_module_and_prints_the_version(wheel, tmp_path, version):
    """From the wheel. The packages for that Python are not there to run more."""
    python_there = interpreter(version)
    if python_there is None:
        pytest.skip(f"no Python {version} on this machine")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    command = [python_there, "-S", "-W", "error::SyntaxWarning", "-m"]
    done = run([*command, "compileall", "-q", "maxdiloco"], cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stdout
    done = run([*command, "maxdiloco", "--version"], cwd=tmp_path, env=environ)
    assert done.returncode == 0 and maxdiloco.__version__ in done.stdout, done.stderr


def test_the_wheel_reads_a_config_with_few_packages(wheel, tmp_path):
    """pydantic has compiled parts, so only this Python can read one; it needs no JAX."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    site = pathlib.Path(pydantic.__file__).parents[1]
    for name in ("annotated_types", "pydantic", "pydantic_core", "typing_inspection", "yaml"):
        (tmp_path / name).symlink_to(site / name)
    (tmp_path / "typing_extensions.py").symlink_to(site / "typing_extensions.py")
    code = (
        "import sys; from maxdiloco.config import config; "
        "print(config.load(['model_name=35m'], {}).model_name, 'jax' in sys.modules)"
    )
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    done = run([sys.executable, "-S", "-c", code], cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["35m", "False"]


@pytest.fixture
def lock(monkeypatch):
    """scripts/lock.py."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import lock

    return lock


def pinned(pins, **environment):
    """{name: version} of the pins whose markers fit a Python."""
    lines = [Requirement(pin.partition(" \\")[0]) for pin in pins]
    there = [r for r in lines if not r.marker or r.marker.evaluate(environment)]
    found = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in there}
    assert len(found) == len(there)
    assert [v for v in found.values() if not re.fullmatch(r"[0-9][0-9a-z.]*", v)] == []
    return found


@pytest.mark.parametrize(("python", "jax"), [("3.11", "0.10.2"), ("3.12", "0.12.0.1")])
def test_every_requirement_has_an_exact_pin_inside_its_range(requirements, lock, python, jax):
    """jax's extra `tpu` names one libtpu for each release. A program that lacks packages asks for
    those of setup.py."""
    whole = {"python_version": python, "python_full_version": f"{python}.0"}
    found = pinned([pin for _, pin in lock.read()], **whole)
    assert found["jax"] == found["jaxlib"] == jax
    assert {name for r in requirements for name in r.extras} == {
        "epath", "tpu", "cuda12", "cuda13", "s3"}  # fmt: skip
    (libtpu,) = [r for r in map(Requirement, requires("jax")) if r.name == "libtpu"]
    for requirement in [*requirements, *([libtpu] if version("jax") == jax else [])]:
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)])
    names = dict(orbax="orbax-checkpoint", yaml="pyyaml", ml_dtypes="ml-dtypes")
    asked = {canonicalize_name(names.get(name, name)) for name in maxdiloco._PACKAGES}
    assert asked == {canonicalize_name(r.name) for r in requirements if r.marker is None}


def test_the_pins_of_extras_hold_all_that_is_needed_with_hashes(requirements, lock):
    """`pip install --no-deps` adds nothing; what is installed here tells what it needs."""
    entries = lock.read()
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}$", pin) for _, pin in entries)
    checked = 0
    for extra in lock.requirements():
        pins = pinned(pin for extras, pin in entries if {lock.BASE, extra} & extras)
        asked = [r for r in requirements if not r.marker or r.marker.evaluate({"extra": extra})]
        seen = set()
        while asked:
            one = asked.pop()
            name = canonicalize_name(one.name)
            assert name in pins, (extra, name)
            wanted = {(name, part) for part in ("", *one.extras)} - seen
            seen |= wanted
            for _, part in wanted:
                with contextlib.suppress(PackageNotFoundError):
                    needed = list(map(Requirement, requires(name) or []))
                    here = [r for r in needed if not r.marker or r.marker.evaluate({"extra": part})]
                    checked += len(here)
                    asked += here
    assert checked > 300
    image = pinned(pin for extras, pin in entries if {lock.BASE, "tpu", "buckets"} & extras)
    assert {"jax", "libtpu", "obstore", "setuptools"} <= image.keys()
    assert not [name for name in image if re.match("torch|nvidia|jax-cuda", name)]


@pytest.mark.parametrize("command", [["extras", "tpux"], ["packages", "jaxx"], ["pin"]])
def test_the_lock_refuses_what_it_does_not_hold(command):
    done = run([sys.executable, ROOT / "scripts/lock.py", *command])
    assert (done.returncode, done.stdout) == (2, "") and command[-1] in done.stderr


def test_the_package_loads_jax_only_for_what_it_exports_and_names_what_it_lacks():
    """And Orbax for none of it."""
    told = "print([name in sys.modules for name in ('jax', 'orbax.checkpoint')])"
    code = f"import maxdiloco, maxdiloco.config.config, sys; {told}; {{}}; {told}"
    done = python(
        code.format(", ".join(f"maxdiloco.{name}" for name in maxdiloco.__all__)), cwd=ROOT
    )
    assert done.stdout.splitlines() == ["[False, False]", "[True, False]"], done.stderr
    assert maxdiloco.DiLoCo.__module__ == "maxdiloco.engine.diloco"
    assert maxdiloco.Stacked.__module__ == "maxdiloco.diloco.fragments"
    names = [maxdiloco.__getattr__(name).__name__ for name in maxdiloco.__all__]
    assert names == maxdiloco.__all__
    with pytest.raises(AttributeError, match="'Diloco'.*DiLoCo"):
        _ = maxdiloco.Diloco


def test_a_program_run_by_a_wrong_python_ends_in_one_line():
    """-S: no site-packages, as without an activated environment. An old Python reads the files that
    report this, and not the rest of the package. The library raises an ImportError."""
    for module in ("maxdiloco", "maxdiloco.train"):
        done = run([sys.executable, "-S", "-m", module], cwd=ROOT)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and done.stdout == ""
        assert sys.executable in line and "flax" in line and ".venv" in line
    old = "import sys; sys.version_info = (3, 9, 2); sys.argv = {}; import maxdiloco"
    done = python(old.format(["-m"]), cwd=ROOT)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and sys.executable in line and "3.9" in line and "3.11" in line
    done = python(old.format([""]), cwd=ROOT)
    assert done.returncode == 1 and f"ImportError: {line}" in done.stderr
    for name in ("maxdiloco/__init__.py", "maxdiloco/version.py"):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 7))
    with pytest.raises(SyntaxError):
        ast.parse("if a := 1: pass", feature_version=(3, 7))


def test_quickstart_trains_and_lets_the_model_write(tmp_path):
    """Two slices of DiLoCo, by a Python that writes down how it was called, and does nothing."""
    cfg = config.load([str(ROOT / "configs/quickstart.yml")], {})
    slices = cfg.dcn_diloco_parallelism, cfg.ici_fsdp_parallelism
    assert (cfg.run_name, *slices) == ("quickstart", 2, 2)
    fake, log = tmp_path / "venv/bin/python", tmp_path / "log"
    fake.parent.mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").touch()
    fake.write_text(f'#!/bin/sh\nprintf "%s|" "$@" >>{log}; echo >>{log}\n')
    fake.chmod(0o755)
    given = ["steps=3", "run_name=a b", "base_output_directory=/x"]
    for arguments, folder in (([], "runs/quickstart"), (given, "/x/a b")):
        script = ["bash", ROOT / "scripts/quickstart.sh", *arguments]
        done = run(script, cwd="/", env={**os.environ, "MAXDILOCO_VENV": str(tmp_path / "venv")})
        assert done.returncode == 0, done.stderr
        train, generate = log.read_text(encoding="utf-8").splitlines()[-2:]
        assert train.split("|")[:3] == ["-m", "maxdiloco.train", "configs/quickstart.yml"]
        assert train.split("|")[3:] == [*arguments, ""]
        assert generate == f"-m|maxdiloco.generate|{folder}|prompt=def |"


@pytest.mark.parametrize(
    ("script", "venv", "environ", "words"),
    [
        # Names on PATH that hold no Python, as version managers leave them, do not count.
        ("make_venv", "new", {"PATH": "bin"}, "no Python 3.11 or newer on PATH .*Install one, or"),
        ("make_venv", "new", {"MAXDILOCO_PYTHON": "p"}, "PYTHON=.*/p is not .*Set it to one"),
        ("make_venv", "bin", {}, "bin exists and is not .*Name another folder"),
        ("check", "", {"MAXDILOCO_VENV": "none"}, "no ruff in .*/none. Make the environment with"),
    ],
)
def test_a_script_that_cannot_work_says_what_to_do(tmp_path, script, venv, environ, words):
    """And leaves the folder that is no environment alone."""
    there = tmp_path / "bin"
    there.mkdir()
    for name in ("bash", "dirname", "ls"):
        (there / name).symlink_to(shutil.which(name))
    (there / "python3").write_text("#!/bin/bash\nexit 127\n")
    (there / "python3").chmod(0o755)
    before = sorted(tmp_path.rglob("*"))
    environ = {name: str(tmp_path / value) for name, value in environ.items()}
    command = ["bash", ROOT / f"scripts/{script}.sh", *([tmp_path / venv] if venv else [])]
    done = run(command, env=os.environ | environ)
    assert done.returncode == 2
    assert re.search(words, done.stderr)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_environment_is_made_with_what_python3_is(tmp_path):
    """Where that is new enough, as these are, which make none; the next one without it."""
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for name in ("python3", "python3.11", "python3.12"):
        (tmp_path / name).write_text('#!/bin/bash\n[ "$1" = -c ]\n')
        (tmp_path / name).chmod(0o755)
    command = ["bash", ROOT / "scripts/make_venv.sh", tmp_path / "new"]
    for name in ("python3", "python3.12"):
        done = run(command, env={"PATH": str(tmp_path)})
        assert done.returncode == 2 and f"'{name} -m venv {tmp_path}/new' failed" in done.stderr
        (tmp_path / name).unlink()


# -- the image of the Dockerfile, and what the documents tell to install ------------------------


PIP = """#!/bin/bash
if [ "${{@: -1}}" = . ]; then
  exec {python} -m pip "$@" --quiet --no-index --no-deps --upgrade --target {site}
fi
echo "$*" >>{log}; cat "${{@: -1}}" >>{log}
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The Dockerfile's steps as plain commands: (site-packages, the working folder, its variables,
    what pip was told to install, the entry point and the user).

    Its pip installs only the checkout, into a folder of the test, and notes the rest."""
    folder = tmp_path_factory.mktemp("image")
    site, work, programs, log = (folder / name for name in ("site", "work", "bin", "log"))
    work.mkdir()
    programs.mkdir()
    (programs / "pip").write_text(PIP.format(python=sys.executable, site=site, log=log))
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    known, once = {"PATH": f"{programs}:{os.environ['PATH']}"}, {}
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in filter(None, re.sub(r"\\\n", " ", text).splitlines()):
        instruction, _, rest = line.partition(" ")
        match instruction:
            case "COPY":
                *names, target = rest.split()
                for name in names:
                    assert f"!{name}" in ignored
                    if (ROOT / name).is_dir():
                        shutil.copytree(ROOT / name, work / target, dirs_exist_ok=True)
                    else:
                        (work / target).mkdir(exist_ok=True)
                        shutil.copy2(ROOT / name, work / target)
            case "RUN":
                done = run(["bash", "-c", rest], cwd=work, env=os.environ | known)
                assert done.returncode == 0, done.stderr
            case "ARG" | "ENV":
                known |= dict(word.split("=", 1) for word in rest.split())
            case _:
                assert instruction in ("FROM", "WORKDIR", "USER", "ENTRYPOINT")
                once[instruction] = rest
    known["HOME"] = known["HOME"].replace(once["WORKDIR"], str(work))
    known["PYTHONPATH"] = str(site)
    return site, work, known, log.read_text(), once


def test_the_image_holds_a_working_maxdiloco(image):
    """What is imported from the working folder is the installed package."""
    site, work, known, installed, _ = image
    code = (
        "import maxdiloco; from maxdiloco.config import config; print(maxdiloco.__file__); "
        "print(config.load(['model_name=35m'], {}).model_name, maxdiloco.DiLoCo.__name__)"
    )
    done = python(code, cwd=work, env=os.environ | known)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site / "maxdiloco/__init__.py"), "35m", "DiLoCo"]
    command, *pins = installed.splitlines()
    assert {"--require-hashes", "--no-deps"} <= set(command.split())
    assert len([line for line in pins if "--hash=sha256:" in line]) > 500
    assert {"libtpu", "obstore"} <= {line.partition("==")[0] for line in pins}
    assert sorted(path.name for path in work.iterdir()) == [
        "configs", "home", "pyproject.toml", "requirements.lock", "runs", "setup.py"
    ]  # fmt: skip


def as_user(user):
    """The start of a command as a user who is in no /etc/passwd, may read all and writes only what
    is its own; skips where it cannot be."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user needs root and setpriv of util-linux")
    assert subprocess.run(["getent", "passwd", "12345"]).returncode != 0
    ids = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    read = "+dac_read_search"  # as the checkout may be below /root
    return ["setpriv", *ids, f"--inh-caps={read}", f"--ambient-caps={read}"] if user else []


WRITES = """
import os, pathlib
from maxdiloco.storage.run_folder import open_run_folder
with open_run_folder("{output}", f"of-{{os.getuid()}}") as folder:
    print(os.stat(folder.path).st_uid)
(pathlib.Path.home() / f".cache-of-{{os.getuid()}}").mkdir(exist_ok=True)
"""


@pytest.mark.parametrize("user", [0, 10001, 12345])
def test_a_user_of_the_image_writes_output_home_and_mounts(image, tmp_path, user):
    """Any user, also root; a mount of its own, which for root is anybody's."""
    _, work, known, _, once = image
    assert once["USER"] == "${USER_ID}:${USER_ID}" and known["USER_ID"] == "10001"
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    os.chown(mounted, user or 12345, -1)
    for output in ("runs", mounted):
        code = WRITES.format(output=output)
        command = [*as_user(user), sys.executable, "-c", code]
        done = run(command, cwd=work, env=os.environ | known)
        assert (done.returncode, done.stdout) == (0, f"{user}\n"), done.stderr


def test_a_mount_of_another_user_is_one_line_and_exit_code_2(image, tmp_path):
    _, work, known, _, once = image
    command = [*as_user(10001), *json.loads(once["ENTRYPOINT"]), "dataset_type=synthetic"]
    command += ["hardware=cpu", "model_name=tiny", "run_name=a"]
    command += [f"base_output_directory={tmp_path}"]
    done = run(command, cwd=work, env=os.environ | known)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"base_output_directory={tmp_path}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_citation_has_the_version_of_setup_py_and_no_licence_is_given():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert cited["version"] == re.search(r'version="([\d.]+)"', setup)[1]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert not list(ROOT.glob("LICEN[CS]E*")) and "license=" not in setup
