"""An island of two processes and an island of one, over one store."""

import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import island_process
import jax
import numpy as np
import pytest
from run import FEW_OPTIMIZATIONS, Process, assert_exit_codes, cluster_environs
from test_island_trainer import STEPS, in_threads, started, steps_of, until

from maxdiloco.islands import audit, log_store


def alone(folder, name):
    """Island 1, in this process."""
    trainer = island_process.island(folder, name, 1)
    if name == "lockstep":
        steps_of(trainer, 1, STEPS, island_process.problem())
    else:
        state, batch = started(trainer)
        until(trainer, state, batch, lambda: trainer.done)
    trainer.close()
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where island 0, of two processes, and island 1 have trained in each run."""
    folder = tmp_path_factory.mktemp("islands")
    jax.config.update("jax_disable_most_optimizations", True)
    environ = FEW_OPTIMIZATIONS | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, island_process.__file__, str(folder), *island_process.RUNS]
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())
        both = [Process(command, environ | own) for own in cluster_environs(2)]
        processes = [stack.enter_context(process) for process in both]
        others = pool.submit(lambda: [alone(folder, name) for name in island_process.RUNS])
        assert_exit_codes(processes, 0, 0)
        assert others.result(60)
    yield folder
    jax.config.update("jax_disable_most_optimizations", False)


def found(folder, name):
    """What each process has."""
    return [dict(np.load(folder / f"{name}.{process}.npz")) for process in (0, 1)]


def require_equal(one, other):
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name)


def logs_of(folder, name):
    """Replayed; every digest, weight and token is that of the log, or this raises."""
    bucket = log_store.open_bucket(str(folder / name))
    run = audit.read_run(bucket)
    return [audit.replay(bucket, run, fragment) for fragment in range(len(run.fragments))]


def test_an_island_of_two_processes_is_one_of_two_devices(folder, tmp_path):
    """To the bit: theta, replica and moments of both processes, and the records of the log."""
    first, second = found(folder, "lockstep")
    require_equal(first, second)

    def work(m):
        if m == 1:
            return alone(tmp_path, "lockstep")
        trainer = island_process.over_two_devices(tmp_path, "lockstep")
        return island_process.trained(trainer, "lockstep")

    require_equal(first, in_threads(work, 2)[0])
    of_processes, of_devices = (
        [record.gradient for log in logs_of(each, "lockstep") for record in log.records]
        for each in (folder, tmp_path)
    )
    assert of_processes == of_devices and len(of_processes) == 3


def test_both_processes_warm_up_after_a_second_start(folder):
    """A quarter and a half of the rate, as H = 4; the first start has the full rate."""
    first, second = found(folder, island_process.AGAIN)
    require_equal(first, second)
    assert first["warmups"].tolist() == [0.25, 0.5]
    assert set(found(folder, "lockstep")[1]["warmups"].tolist()) == {1.0}


def test_an_island_of_two_processes_reads_and_steps_alike(folder):
    """The same rates and places of the text in both, no place of the other island's, each once;
    the log adds up, with messages of both islands."""
    first, second = found(folder, "free")
    require_equal(first, second)
    assert len(first["rates"]) > 4 and len(set(first["rates"])) > 3
    places = first["places"].tolist()
    assert len(places) == len(set(places)) == len(first["rates"])
    (log,) = logs_of(folder, "free")
    assert {m.island for r in log.records for m in r.members} == {"0", "1"}
    assert log.state.tokens >= 400


def test_an_island_of_two_processes_reads_its_part_of_the_global_batch(folder):
    """Both processes read the same sequences, at first or later 2 of 5 a step, and island 1 the
    other 3. The log adds up."""
    first, second = found(folder, "shared")
    require_equal(first, second)
    places = first["places"].tolist()
    assert len(places) == len(set(places))
    (log,) = logs_of(folder, "shared")
    members = [one for record in log.records for one in record.members]
    assert {"0", "1"} == {one.island for one in members} and log.state.tokens >= 4000
    per_step = {(one.island, one.tokens / max(one.steps, 1)) for one in members}
    assert {("0", 8.0), ("1", 12.0)} <= per_step
