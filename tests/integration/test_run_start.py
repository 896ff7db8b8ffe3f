"""The start of a run: refusals before JAX is loaded, the log of compiles, and the compile cache."""

import gc
import os
import re
import subprocess
import sys

import jax
import pytest
from run import ROOT, names_key, train
from run_files import metrics_rows

from maxdiloco import output
from maxdiloco.errors import ConfigError
from maxdiloco.metrics import console
from maxdiloco.metrics.compile_log import CompileLog


@pytest.mark.parametrize(
    "key, hardware",
    [
        ("hardware=gpu", "gpu"),
        ("hardware=tpu", "tpu"),
        ("num_communication_overlapping_steps=1000", "cpu"),
    ],
)
def test_a_process_refuses_absent_hardware_and_wrong_keys(tmp_path, key, hardware):
    """Without a plugin or a device JAX raises for a TPU, and uses the CPU instead of a GPU. An
    impossible exchange is refused before JAX is loaded."""
    # Found before installed ones, which would ask for their devices.
    for name, text in [("libtpu", "raise ImportError('not here')"), ("jax_plugins", "")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    code = (
        "import sys; from maxdiloco import train; "
        "print(train.main(sys.argv[1:]), 'jax' in sys.modules, 'numpy' in sys.modules)"
    )
    keys = [f"hardware={hardware}", "dataset_type=synthetic", "diloco_sync_period=4", key]
    done = subprocess.run(
        [sys.executable, "-c", code, *dict.fromkeys(keys)],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
        | {"M_BASE_OUTPUT_DIRECTORY": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
    )
    loads = hardware != "cpu"
    assert done.stdout.splitlines()[-1] == f"2 {loads} {loads}", done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert line.startswith(f"ConfigError: {key} ")
    assert not (tmp_path / "runs").exists()


def test_a_start_of_one_process_does_not_import_slow_packages():
    """Each takes a tenth of a second or more. Control: several processes need links."""
    code = """
import sys

def loaded():
    heavy = {"aiohttp", "cryptography", "grain", "orbax", "tensorboardX", "tensorstore"}
    print(*sorted(heavy & sys.modules.keys()))

from maxdiloco.run import start
loaded()
from maxdiloco.cluster import peers
loaded()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "\naiohttp cryptography\n"


STREAMING = dict(
    enable_streaming_diloco="true", num_diloco_fragments=2, num_communication_overlapping_steps=1
)


@pytest.fixture
def compiles(monkeypatch):
    """What a run would have compiled when its compile fails: the names, and whether garbage is
    collected then."""
    found = []

    def compile_all(self, calls, *, remedy, resident):
        found.append(([call.program.name for call in calls], gc.isenabled()))
        raise ConfigError(remedy)

    monkeypatch.setattr(CompileLog, "compile_all", compile_all)
    return found


@pytest.mark.usefixtures("compiles")
def test_remat_policy_full_is_a_remedy_unless_it_is_set_already(tmp_path):
    """remat_policy=auto is `save_context` on a CPU."""
    keys = dict(enable_checkpointing="false", optimizer_memory_host_offload="true")
    for policy in ("auto", "minimal", "full"):
        run = train(tmp_path / policy, remat_policy=policy, **keys)
        assert run.code == 2 and names_key(run.error, "diloco_outer_memory")
        assert ("remat_policy=full" in run.error) == (policy != "full")


def test_the_inner_step_is_lowered_first_and_the_initial_state_next(tmp_path, compiles):
    """`inner` compiles longest, and the state is made while it compiles. Garbage is collected again
    after the error, and after one before the compile; control: it is not collected until then."""
    keys = dict(eval_interval=4, eval_steps=1, **STREAMING)
    assert train(tmp_path / "run", **keys).code == 2
    assert gc.isenabled()
    assert train(tmp_path / "run", dataset_type="none").code == 2
    assert gc.isenabled()
    ((names, collected),) = compiles
    assert not collected
    assert names[:2] == ["inner", "init"]
    assert "inner + exchange" in names[2:] and "evaluate" in names[2:]


@pytest.mark.usefixtures("programs")
def test_fragments_and_compiles_are_logged_before_the_first_step(tmp_path, monkeypatch):
    """Two step programs, a pack and a merge for the layers and for the rest, and two others.
    show_memory prints the memory of each, and the part beyond that of plain training."""
    said = []
    for module in (output, console):
        monkeypatch.setattr(module, "say", lambda text, stream=None: said.append(text))
    # The programs are those of test_resume.py, and compiled once for both.
    keys = dict(num_diloco_fragments=3, diloco_sync_period=6, communication_overlapping_alpha=0.5)
    keys |= dict(num_communication_overlapping_steps=2, show_memory="true", steps=9)
    assert train(tmp_path / "streaming", **STREAMING | keys).code == 0
    told = [re.fullmatch(r"compiled (.*) in [\d.]+ s", line) for line in said]
    kinds = sorted(found[1].partition(" [")[0] for found in told if found)
    steps = ["inner", "inner + exchange", "merge", "merge", "pack", "pack"]
    assert kinds == sorted([*steps, "init", "watch"])
    (ready,) = [i for i, line in enumerate(said) if re.match(r"8 programs ready after ", line)]
    begun = said.index("compiling 8 programs, inner first; a line for each")
    assert any(line.startswith("fragment  layers") for line in said[:begun])
    assert any(line.startswith("outer state: ") for line in said[:begun])
    compiled = [i for i, found in enumerate(told) if found]
    assert begun < min(compiled) and max(compiled) < ready
    first = min(i for i, line in enumerate(said) if line.startswith("step "))
    (started,) = [i for i, line in enumerate(said) if line.startswith("started in ")]
    assert ready < started < first
    parts = "keys, imports, devices, data, folder, restore, build, compile, first step".split(", ")
    seconds = re.fullmatch(
        r"started in ([\d.]+) s: " + ", ".join(rf"{part} ([\d.]+)" for part in parts), said[started]
    ).groups()
    whole, *shares = map(float, seconds)
    assert whole == pytest.approx(sum(shares), abs=0.05 * (len(parts) + 1))  # each is rounded

    memory = [i for i, line in enumerate(said) if ": memory a device [MiB]: arguments " in line]
    assert len(memory) == 8 and said[memory[0]].startswith("inner: ")
    for i in memory:
        assert said[i].endswith(tuple("0123456789")) and " on the host " in said[i]
        assert re.match(
            r"  beyond plain training \[MiB a device\]: outer state [\d.]+, "
            r"in flight [\d.]+, temporary [\d.]+$",
            said[i + 1],
        )


@pytest.mark.usefixtures("programs")
def test_more_steps_or_another_seed_compile_no_program_again(tmp_path):
    """Neither the length of the schedule nor the seed is in a program. Another batch size is the
    control: it compiles. All programs are compiled, and counted, before the first step."""
    requests, hits = [], []

    def note(event, **_):
        requests.append(event) if event.endswith("requests_use_cache") else None
        hits.append(event) if event.endswith("/cache_hits") else None

    def programs(name, **keys):
        """Return the programs that a run counts, those from the cache, and its cache misses."""
        del requests[:], hits[:]
        run = train(tmp_path / name, learning_rate_schedule_steps=-1, **keys)
        assert run.code == 0
        lines = run.output.splitlines()
        (ready,) = (i for i, line in enumerate(lines) if " programs ready after " in line)
        stretched = any("step 6 has a rate of " in line for line in lines)
        assert stretched == (keys["steps"] == 9)
        compiled = [i for i, line in enumerate(lines) if line.startswith("compiled ")]
        number, kept = re.match(
            r"(\d+) programs ready after \S+ s(?:, (\d+) of them from)?", lines[ready]
        ).groups(default="0")
        assert len(compiled) == int(number) and max(compiled) < ready
        return int(number), int(kept), len(requests) - len(hits)

    jax.monitoring.register_event_listener(note)
    try:
        number, *_ = programs("longer", steps=4)
        programs("longer", steps=5)  # what a resume computes without a program of ours
        number_then, kept, missed = programs("longer", steps=9, per_device_batch_size=2)
        seeded = programs("seeded", steps=5, init_weights_seed=1)
        other = programs("other", steps=5, per_device_batch_size=3)
    finally:
        jax.monitoring.unregister_event_listener(note)
    assert number_then == number - 1  # the program that makes the first state is not run
    assert missed == seeded[2] == 0 and kept > 0  # this process still has the rest
    assert other[1] < other[0] and other[2] > 0
    first, another = (metrics_rows(tmp_path / name)[0] for name in ("longer", "seeded"))
    assert first["learning/loss"] != another["learning/loss"]
