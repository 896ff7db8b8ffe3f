"""maxdiloco.train as an island of two processes, with another island of one process."""

import signal
import time

import pytest
import ssh_keys
from run import WAIT_S, assert_exit_codes, names_key, start_cluster, start_train
from run_files import logged_steps
from test_island_runs import ELASTIC, log_of

from maxdiloco.islands import __main__ as islands

pytestmark = [pytest.mark.usefixtures("programs")]
# A device each; with one process two devices, or one that has the sequences of both.
OF_TWO = dict(dcn_fsdp_parallelism=2, per_device_batch_size=1)
OF_ONE = dict(per_device_batch_size=2)


def of_island(folder, name, keys):
    return keys | dict(islands_store=folder / "store", island_name=name)


def test_an_unusable_store_ends_both_processes_of_an_island(started, tmp_path):
    """With the exit code and the error of process 0, before anything is compiled."""
    (tmp_path / "store").write_text("a file")
    keys = of_island(tmp_path, "a", ELASTIC | OF_TWO)
    environs = [{"JAX_LOG_COMPILES": "1"}] * 2
    started += start_cluster(2, tmp_path / "a", environs=environs, **keys)
    assert_exit_codes(started, 2, 2)
    for process in started:
        (line,) = process.error_lines()
        assert names_key(line, "islands_store")
        assert "jit(init)" not in process.output


def members(folder):
    """(island, incarnation) of all whose messages count."""
    if not (folder / "store" / "c" / "0" / "1").exists():
        return set()
    return {(m.island, m.incarnation) for r in log_of(folder).records for m in r.members}


@pytest.mark.full
def test_an_island_of_two_processes_is_killed_stopped_and_replaced(started, tmp_path):
    """When one process is killed, the other exits with 5. Both come back as the next incarnation
    after a kill or a stop, while an island of one device and one of two devices in one process,
    which computes in bfloat16, train on. Another program of its name ends both with 2. All sign;
    the log adds up."""
    changes = ELASTIC | dict(steps=100000, log_period=50, checkpoint_period=100)
    (tmp_path / "keys").mkdir()
    key_of = {name: ssh_keys.make(tmp_path / "keys", name) for name in "abc"}

    def start(number):
        keys = of_island(tmp_path, "a", changes | OF_TWO | dict(islands_key=key_of["a"]))
        started.extend(found := start_cluster(2, tmp_path / "a", **keys))
        found[0].wait_for_output(f"island a has joined as incarnation {number}")
        limit = time.monotonic() + WAIT_S
        while ("a", number) not in members(tmp_path):
            assert time.monotonic() < limit, found[0].output
            time.sleep(0.2)
        return found

    of_b = dict(islands_key=key_of["b"])
    other = start_train(tmp_path / "b", **of_island(tmp_path, "b", changes | OF_ONE | of_b))
    started.append(other)
    of_c = dict(islands_key=key_of["c"], dtype="bfloat16")
    third_mesh = start_cluster(
        1, tmp_path / "c", **of_island(tmp_path, "c", changes | OF_TWO | of_c)
    )
    started.extend(third_mesh)
    first = start(1)
    first[1].popen.kill()
    assert_exit_codes(first[:1], 5)
    (line,) = first[0].error_lines()
    assert line.startswith("LostPeerError: process 1 on ")
    second = start(2)
    for process in second:
        process.popen.kill()
    third = start(3)
    third[1].popen.send_signal(signal.SIGTERM)
    assert_exit_codes(third, 143, 143)
    fourth = start(4)
    for process in (other, *third_mesh):
        process.popen.send_signal(signal.SIGTERM)
    assert_exit_codes([other, *third_mesh], 143, 143)
    keys = of_island(tmp_path, "a", changes | OF_ONE) | dict(islands_key=key_of["a"])
    another = start_train(tmp_path / "another", **keys)
    started.append(another)
    assert_exit_codes(fourth, 2, 2)
    assert all("island_name=a:" in process.output for process in fourth)
    another.popen.send_signal(signal.SIGTERM)
    assert_exit_codes([another], 143)
    assert members(tmp_path) >= {("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 1), ("c", 1)}
    assert islands.main(["audit", str(tmp_path / "store")]) == 0
    steps = logged_steps(tmp_path / "a")
    assert steps == sorted(set(steps))
