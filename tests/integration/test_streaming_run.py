"""A streaming run of the command line: what it tells at the start and at every compile."""

import re
import subprocess
import sys

import pytest
import run_tools as tools

from maxdiloco.metrics import console
from maxdiloco.processes import output

pytestmark = pytest.mark.usefixtures("programs")

# The programs are those of test_resume.py, and compiled once for both.
KEYS = dict(
    enable_streaming_diloco="true",
    num_diloco_fragments=3,
    diloco_sync_period=6,
    num_communication_overlapping_steps=2,
    communication_overlapping_alpha=0.5,
    show_memory="true",
    steps=9,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, and the lines that it printed."""
    folder = tmp_path_factory.mktemp("streaming")
    with pytest.MonkeyPatch.context() as patch:
        said = []
        for module in (output, console):
            patch.setattr(module, "say", lambda text, stream=None: said.append(text))
        assert tools.run(folder, "streaming", **KEYS) == 0
    return folder, said


def test_fragments_then_every_compile_are_told_before_the_first_step(run):
    """Two step programs, a pack and a merge for the layers and for the rest, and those beside."""
    _, said = run
    told = [re.fullmatch(r"compiled (.*) in [\d.]+ s", line) for line in said]
    kinds = sorted(found[1].partition(" [")[0] for found in told if found)
    steps = ["inner", "inner + exchange", "merge", "merge", "pack", "pack"]
    assert kinds == sorted([*steps, "init", "watch"])
    (ready,) = [i for i, line in enumerate(said) if re.match(r"8 programs ready after ", line)]
    begun = said.index("compiling 8 programs, inner first; a line for each")
    assert any(line.startswith("fragment  layers") for line in said[:begun])
    assert any(line.startswith("outer state: ") for line in said[:begun])
    assert begun < min(i for i, found in enumerate(told) if found)
    assert max(i for i, found in enumerate(told) if found) < ready
    assert ready < min(i for i, line in enumerate(said) if line.startswith("step "))


def test_show_memory_tells_each_program_and_what_it_costs_beyond_plain_training(run):
    _, said = run
    memory = [i for i, line in enumerate(said) if ": memory a device [MiB]: arguments " in line]
    assert len(memory) == 8 and said[memory[0]].startswith("inner: ")
    for i in memory:
        assert said[i].endswith(tuple("0123456789")) and " on the host " in said[i]
        assert re.match(
            r"  beyond plain training \[MiB a device\]: outer state [\d.]+, "
            r"in flight [\d.]+, temporary [\d.]+$",
            said[i + 1],
        )


def test_what_no_exchange_can_be_is_refused_with_2_before_jax_loads(tmp_path):
    """Every refusal and its words are in tests/flags/test_config_errors.py."""
    code = (
        "import sys; from maxdiloco import train; "
        "print(train.main(sys.argv[1:]), 'jax' in sys.modules, 'numpy' in sys.modules)"
    )
    argv = tools.arguments(tmp_path / "runs", "refused", num_communication_overlapping_steps=4)
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=tools.ROOT, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["2 False False"], done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("ConfigError: num_communication_overlapping_steps=4 ")
    assert not (tmp_path / "runs").exists()
