"""The exchange through host memory against the one inside programs: the same bits, and each goes
on where a checkpoint of the other was in flight.

    # R replicas
"""

import functools
import hashlib
import os
import sys

import jax
import numpy as np
import process_tools
import pytest
from streaming import MODES, WIRES, made, placed, steps
from tiers import corner, full

from maxdiloco.engine.trainer import SavedLayout

CASES = [(mode, wire) for mode in MODES for wire in WIRES]
# But for eager, with the merge rda, too.
FEEDBACK = [("at once", "int2"), ("overlapped", "topk"), ("delayed", "int2"), ("eager", "topk")]
# Each mode and each wire once.
CORNER = [*zip(MODES, WIRES, strict=True), ("delayed", "int2"), ("eager", "topk")]


@pytest.fixture(scope="module", autouse=True)
def few_compiler_passes():
    """As in test_against_oracle.py: nearly all the time goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    trainer.cache_clear()
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def trainer(mode, wire, carrier):
    """A trainer and what gives its first state."""
    merge = "rda" if (mode, wire) in FEEDBACK and mode != "eager" else "mean"
    algorithm = made(mode, wire, 2, exchange_carrier=carrier, merge=merge)
    first = algorithm.init(placed(algorithm.mesh), ())
    shardings = jax.tree.map(lambda x: x.sharding, first)
    arrays = jax.tree.map(np.array, first)
    return algorithm, lambda: jax.device_put(arrays, shardings)


def bits(state):
    """A digest of each leaf: pytest would look for a difference of megabytes for minutes."""
    trees = (state.params, state.outer, state.outer_opt, state.bad, state.sizes)
    trees += (state.residual, state.residual_norm_R)
    return [hashlib.sha256(np.array(x).tobytes()).hexdigest() for x in jax.tree.leaves(trees)]


def copied(items):
    """As a checkpoint gives them back: of their own memory."""
    shardings = jax.tree.map(lambda x: x.sharding, items)
    return jax.device_put(jax.tree.map(np.array, items), shardings)


@pytest.mark.parametrize("mode, wire", corner(CASES + FEEDBACK, CORNER))
def test_both_compute_the_same_bits_and_resume_what_the_other_has_saved(mode, wire):
    """Saved after 8 and 9: one exchange was just sent, one has one of two chunks there, one is
    whole."""
    states, saved = {}, {}
    for carrier in ("program", "host"):
        algorithm, start = trainer(mode, wire, carrier)
        states[carrier] = []
        for state in steps(algorithm, start()):
            states[carrier].append(bits(state))
            if state.t in (8, 9):
                saved[carrier, state.t] = copied(algorithm.saved_items(state))
    assert states["host"] == states["program"]
    layout = SavedLayout(**algorithm.note(state), same_rules=True)
    for saver, resumer in (("program", "host"), ("host", "program"), ("host", "host")):
        for t in (8, 9):
            algorithm, _ = trainer(mode, wire, resumer)
            again = algorithm.restored(copied(saved[saver, t]), layout, t=t)
            found = [bits(state) for state in steps(algorithm, again)]
            assert found == states["program"][t:], f"{saver} -> {resumer} at {t}"


@pytest.mark.parametrize("mode", MODES)
def test_no_program_of_the_host_carrier_sends_to_another_slice(mode):
    """Positive control: the programs of the other carrier do."""
    sends = {}
    for carrier in ("program", "host"):
        algorithm, _ = trainer(mode, "int8", carrier)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            algorithm.abstract_state.params,
        )
        texts = [c.program.lower(*c.args).compile().as_text() for c in algorithm.calls(batch)]
        sends[carrier] = any("all-gather" in text and "{0,2}" in text for text in texts)
    assert sends == {"program": True, "host": False}


@pytest.fixture
def together(tmp_path):
    """carriers_process.py as several processes; none outlives the test."""
    running = []

    def run(count, *arguments):
        environ = {
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONPATH": os.pathsep.join([str(process_tools.ROOT), *sys.path]),
        }
        command = [sys.executable, "tests/integration/carriers_process.py", *arguments]
        for i, mine in enumerate(process_tools.variables(count)):
            running.append(process_tools.Process(command, tmp_path / f"{i}.log", environ | mine))
        return running

    yield run
    for process in running:
        process.kill()


@pytest.mark.parametrize(
    ("count", "slots", "replicas", "cases"),
    [
        (2, 2, 4, ["at once:float32", "overlapped:float4_e3m0:pinned_host", "delayed:bfloat16",
                   "eager:int8"]),
        full(3, 3, 3, ["overlapped:int2", "eager:float4_e3m0:pinned_host"]),
        full(4, 2, 2, ["at once:int8", "overlapped:float32"]),
    ],
)  # fmt: skip
def test_several_processes_exchange_the_bits_that_programs_do(
    together, count, slots, replicas, cases
):
    """Two devices in a slice: in one process each but for the last, where two share a slice. With
    pinned_host the chunks of a process's own devices are moved to them and back."""
    processes = together(count, str(slots), str(replicas), *cases)
    assert [process.end() for process in processes] == [0] * count, processes[0].text()
    for process in processes:
        lines = [line for line in process.text().splitlines() if line.startswith("equal ")]
        for line, case in zip(lines, cases, strict=True):
            assert line.startswith(f"equal {case.replace(':', ' ')}")
            assert not line.endswith(": 0 bytes sent")
