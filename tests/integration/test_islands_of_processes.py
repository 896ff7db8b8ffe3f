"""maxdiloco.train as an island of two processes, beside one of one process."""

import signal
import time

import process_tools
import pytest
import run_tools
import ssh_keys
from test_island_runs import ELASTIC, log_of

from maxdiloco.islands import __main__ as islands

pytestmark = [pytest.mark.usefixtures("programs")]
# A device each; with one process two devices, or one that has the sequences of both.
OF_TWO = dict(dcn_fsdp_parallelism=2, per_device_batch_size=1)
OF_ONE = dict(per_device_batch_size=2)


def named(folder, name, changes):
    here = dict(base_output_directory=folder, islands_store=folder / "store", run_name=name)
    return changes | here | dict(island=name)


def test_what_process_0_finds_wrong_with_the_store_ends_both(started, tmp_path):
    """With its exit code and its line, before anything is compiled."""
    (tmp_path / "store").write_text("a file")
    changes = named(tmp_path, "a", ELASTIC | OF_TWO)
    environs = [{"JAX_LOG_COMPILES": "1"}] * 2
    started += process_tools.trainers(2, changes, tmp_path, environs)
    process_tools.ends(started, 2, 2)
    for process in started:
        (line,) = process.errors()
        assert f"islands_store={tmp_path / 'store'}" in line
        assert "jit(init)" not in process.text()


def members(folder):
    """(island, incarnation) of all whose messages count."""
    if not (folder / "store" / "c" / "0" / "1").exists():
        return set()
    return {(m.island, m.incarnation) for r in log_of(folder).records for m in r.members}


@pytest.mark.full
def test_an_island_of_two_processes_is_killed_stopped_and_replaced(started, tmp_path):
    """One process killed ends the other with 5; both killed, or told to stop, come back as the next
    incarnation, beside islands of one device and of two that share one process, which computes in
    bfloat16; another program of its name ends both with 2. All sign; the log adds up."""
    changes = ELASTIC | dict(steps=100000, log_period=50, checkpoint_period=100)
    (tmp_path / "keys").mkdir()
    key_of = {name: ssh_keys.make(tmp_path / "keys", name) for name in "abc"}

    def start(number):
        folder = tmp_path / f"start{number}"
        folder.mkdir()
        keys = named(tmp_path, "a", changes | OF_TWO | dict(islands_key=key_of["a"]))
        started.extend(found := process_tools.trainers(2, keys, folder))
        found[0].wait_for(f"island a is in, its start number {number}")
        limit = time.monotonic() + run_tools.WAIT_S
        while ("a", number) not in members(tmp_path):
            assert time.monotonic() < limit, found[0].text()
            time.sleep(0.2)
        return found

    of_b = dict(islands_key=key_of["b"])
    other = process_tools.trainer(named(tmp_path, "b", changes | OF_ONE | of_b), tmp_path / "b.log")
    started.append(other)
    (tmp_path / "c").mkdir()
    of_c = dict(islands_key=key_of["c"], dtype="bfloat16")
    third_mesh = process_tools.trainers(
        1, named(tmp_path, "c", changes | OF_TWO | of_c), tmp_path / "c"
    )
    started.extend(third_mesh)
    first = start(1)
    first[1].popen.kill()
    process_tools.ends(first[:1], 5)
    (line,) = first[0].errors()
    assert line.startswith("LostPeerError: process 1 on ") and "is gone" in line
    second = start(2)
    for process in second:
        process.popen.kill()
    third = start(3)
    third[1].popen.send_signal(signal.SIGTERM)
    process_tools.ends(third, 143, 143)
    fourth = start(4)
    for process in (other, *third_mesh):
        process.popen.send_signal(signal.SIGTERM)
    process_tools.ends([other, *third_mesh], 143, 143)
    keys = named(tmp_path, "a", changes | OF_ONE) | dict(run_name="another")
    keys |= dict(islands_key=key_of["a"])
    another = process_tools.trainer(keys, tmp_path / "another.log")
    started.append(another)
    process_tools.ends(fourth, 2, 2)
    assert all("island=a: another program runs as" in process.text() for process in fourth)
    another.popen.send_signal(signal.SIGTERM)
    process_tools.ends([another], 143)
    assert members(tmp_path) >= {("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 1), ("c", 1)}
    assert islands.main(["audit", str(tmp_path / "store")]) == 0
    steps = run_tools.logged_steps(tmp_path / "a")
    assert steps == sorted(set(steps))
