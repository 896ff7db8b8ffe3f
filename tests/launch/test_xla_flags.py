"""scripts/launch/xla_flags.env: bash and the scripts read the same, and the compilers know it."""

import os
import re
import subprocess
import sys

import launch_tools as tools
import pytest

FILE = tools.ROOT / "scripts/launch/xla_flags.env"


@pytest.fixture
def compiler_flags(monkeypatch):
    monkeypatch.syspath_prepend(str(tools.ROOT / "scripts/launch"))
    import compiler_flags

    return compiler_flags


def python(code, **environ):
    environ = os.environ | {"PYTHONPATH": str(tools.ROOT), "JAX_PLATFORMS": "cpu"} | environ
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("hardware", ["tpu", "gpu"])
def test_bash_and_the_launch_scripts_read_the_same_flags(compiler_flags, hardware):
    faults = []
    found = compiler_flags.read(str(FILE), hardware, faults)
    name = compiler_flags.OF[hardware]
    code = f'{name}=; . {FILE}; echo "${name}"'
    sourced = subprocess.run(["bash", "-euc", code], capture_output=True, text=True)
    assert (found, faults) == (sourced.stdout.strip(), []) and found.startswith("--")


def test_a_line_that_is_no_flag_is_named(compiler_flags, tmp_path):
    (tmp_path / "f").write_text('# a\nXLA_FLAGS+=" --a=b"\nXLA_FLAGS=--c=d\n')
    faults = []
    assert compiler_flags.read(str(tmp_path / "f"), "gpu", faults) == "--a=b"
    (fault,) = faults
    assert re.search(r"line 3 is no flag: XLA_FLAGS=--c=d\. Write it as", fault)
    assert compiler_flags.read("none", "gpu", []) == ""


def test_the_pinned_jaxlib_knows_the_flags_of_gpus(compiler_flags):
    """XLA reads all of XLA_FLAGS on any platform, and refuses what it does not know."""
    code = "import jax; print(jax.devices()[0].platform)"
    known = python(code, XLA_FLAGS=compiler_flags.read(str(FILE), "gpu", []))
    assert known.stdout == "cpu\n", known.stderr
    assert "Unknown flag" in python(code, XLA_FLAGS="--xla_gpu_no_such_flag=1").stderr


@pytest.mark.tpu_aot
def test_the_pinned_libtpu_knows_the_flags_of_tpus(compiler_flags):
    code = "from maxdiloco.aot import topology; print(len(topology.devices('v5e-4', 2)))"
    known = python(code, LIBTPU_INIT_ARGS=compiler_flags.read(str(FILE), "tpu", []))
    assert known.stdout == "8\n", known.stderr
    unknown = python(code, LIBTPU_INIT_ARGS="--megascale_no_such_flag=1")
    assert "Unknown command line flag" in unknown.stderr
