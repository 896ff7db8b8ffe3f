"""maxdiloco.train as an island of two processes, beside one of one process."""

import signal
import time

import process_tools
import pytest
import run_tools
import ssh_keys
from test_island_runs import ELASTIC, TINY, log_of

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


# What depends on the clock, or on how often the store was asked; the last is of a message of the
# same start.
OF_TIME = ("dcn/waited_s", "dcn/bytes_sent", "islands/requests", "islands/bytes_received")
OF_TIME += ("islands/alive", "islands/records", "islands/progress", "islands/committed_tokens")
OF_TIME += ("islands/own_tokens", "islands/undecided", "diloco/outer_grad_norm")


def timeless_rows(run):
    return [
        {key: value for key, value in row.items() if key not in OF_TIME}
        for row in run_tools.rows(run)
    ]


def values_of(run, step):
    """Of a checkpoint, but for the place in the log, which has the authors of its records."""
    found = run_tools.arrays(run, step)
    return {name: x for name, x in found.items() if not name.startswith("island")}


@pytest.mark.full
def test_a_fixed_island_of_two_processes_trains_as_one_of_two_devices(started, tmp_path):
    """The same rows, and the same checkpoints to the bit, though both processes are killed on the
    way: which process owns a device changes no order of a sum."""
    changes = TINY | dict(steps=24, islands="fixed", islands_min=2, checkpoint_period=6)
    changes |= dict(num_communication_overlapping_steps=1, enable_streaming_diloco="true")
    changes |= dict(num_diloco_fragments=2, diloco_exchange_dtype="int8", eval_interval=12)
    changes |= dict(eval_steps=1, async_checkpointing="false")

    def start(folder, count):
        folder.mkdir()
        found = process_tools.trainers(count, named(folder.parent, "0", changes | OF_TWO), folder)
        started.extend(found)
        return found

    for way, count in (("processes", 2), ("devices", 1)):
        (folder := tmp_path / way).mkdir()
        keys = named(folder, "1", changes | OF_ONE)
        other = process_tools.trainer(keys, folder / "1.log")
        started.append(other)
        own = start(folder / "first", count)
        if count == 2:
            own[0].wait_for("step 8/")
            for process in own:
                process.popen.kill()
            own = start(folder / "second", count)
            own[0].wait_for("resumed after step ")
        process_tools.ends([other, *own], *[0] * (1 + count))
    for name in ("0", "1"):
        one, other = (tmp_path / way / name for way in ("processes", "devices"))
        rows, wanted = map(timeless_rows, (one, other))
        assert rows == wanted and len(rows) == 24
        run_tools.assert_equal_bits(*(values_of(run, 24) for run in (one, other)))
    gradients = [
        [r.gradient for r in log_of(tmp_path / way).records[:5]] for way in ("processes", "devices")
    ]  # a sixth one, of the last step, may come in time
    assert gradients[0] == gradients[1] and len(gradients[0]) == 5


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
