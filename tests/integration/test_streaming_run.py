"""A streaming run of the command line: what it tells at the start and at every compile, and the
keys that its resumption refuses.
"""

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
# `embedding` 32 * 16 and the last norm 16; the layers share the rest.
FRAGMENTS = [("0", "none", "528"), ("1", "0", None), ("2", "1", None)]


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


def test_fragments_and_outer_state_are_told_before_the_first_compile(run):
    _, said = run
    first = next(i for i, line in enumerate(said) if line.startswith("compiled "))
    start = said[:first]
    (total,) = [int(m[1].replace(",", "")) for line in start
                if (m := re.fullmatch(r"model: .*, ([\d,]+) parameters", line))]  # fmt: skip
    (head,) = [i for i, line in enumerate(start) if line.startswith("fragment  layers")]
    rows = [line.split() for line in start[head + 1 : head + 4]]
    layer = f"{(total - 528) // 2:,}"
    assert [row[:3] for row in rows] == [[p, name, n or layer] for p, name, n in FRAGMENTS]
    assert any(
        re.fullmatch(r"outer state: .* one copy on every slice, kept in device", line)
        for line in start
    )


def test_every_program_is_compiled_and_told_before_the_first_step(run):
    """Two step programs, a pack and a merge for the layers and for the rest, and those beside."""
    _, said = run
    told = [re.fullmatch(r"compiled (.*) in [\d.]+ s", line) for line in said]
    kinds = sorted(found[1].partition(" [")[0] for found in told if found)
    steps = ["inner", "inner + exchange", "merge", "merge", "pack", "pack"]
    assert kinds == sorted([*steps, "init", "watch"])
    (ready,) = [i for i, line in enumerate(said) if re.match(r"8 programs ready after ", line)]
    begun = said.index("compiling 8 programs, inner first; a line for each")
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


REFUSED = [
    ("num_diloco_fragments=4 enable_streaming_diloco=true", "num_nonlayer_fragments 1 = 3"),
    ("num_communication_overlapping_steps=4", "below diloco_sync_period=4"),
    ("num_diloco_fragments=3 enable_streaming_diloco=true diloco_sync_period=2", "Use 1 to 2."),
    ("communication_overlapping_alpha=1.01", "must be 0 to 1"),
    ("communication_overlapping_alpha=-0.01", "must be 0 to 1"),
    ("diloco_outer_overlap=eager num_communication_overlapping_steps=1", "=eager"),
    ("diloco_outer_overlap=delayed num_communication_overlapping_steps=1", "=delayed"),
    ("num_diloco_fragments=2", "enable_streaming_diloco=false"),
    ("diloco_exchange_dtype=fp4", "must be one of: float32, bfloat16, int8, float4_e3m0"),
]


def test_what_no_exchange_can_be_is_refused_in_one_line_with_2_before_jax_loads(tmp_path):
    """Each starts with the key at fault and its value, and ends with what to use instead."""
    code = (
        "import ast, sys\n"
        "from maxdiloco import train\n"
        "for argv in ast.literal_eval(sys.argv[1]):\n"
        "    print(train.main(argv), 'jax' in sys.modules, 'numpy' in sys.modules)\n"
    )
    argvs = [
        tools.arguments(tmp_path / "runs", "refused", **dict(x.split("=") for x in flags.split()))
        for flags, _ in REFUSED
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, str(argvs)], cwd=tools.ROOT, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["2 False False"] * len(REFUSED), done.stderr
    for line, (flags, why) in zip(done.stderr.splitlines(), REFUSED, strict=True):
        assert line.startswith("ConfigError: ")
        assert why in line
        assert any(f"{flag} " in line for flag in flags.split())
        assert "Use " in line.removeprefix("ConfigError: ")
    assert not (tmp_path / "runs").exists()
