"""maxdiloco.train as islands over a folder: one, several at once, killed, and late joiners."""

import json

import pytest
import ssh_keys
from run import CLUSTER_KEYS, assert_exit_codes, names_key, start_train, train
from run_files import checkpoint_meta, metrics_rows, saved_steps

from maxdiloco.islands import __main__ as islands
from maxdiloco.islands import audit, log_store, runtime

pytestmark = [pytest.mark.usefixtures("programs")]
ALONE = dict(dcn_diloco_parallelism=1, islands_period_seconds=0.1, islands_dead_seconds=3)
# One replica on one device; the learning rate follows the committed tokens.
ELASTIC = CLUSTER_KEYS | dict(
    dcn_diloco_parallelism=1,
    ici_fsdp_parallelism=1,
    diloco_sync_period=4,
    learning_rate_schedule_steps=-1,
    enable_islands="true",
    islands_period_seconds=1,
    islands_dead_seconds=3,
)


def island(folder, name, **changes):
    """Return the keys of an island."""
    keys = dict(enable_islands="true", islands_store=folder / "store", island_name=name)
    return keys | ALONE | changes


def log_of(folder, fragment=0):
    bucket = log_store.open_bucket(str(folder / "store"))
    return audit.replay(bucket, audit.read_run(bucket), fragment)


def test_an_island_trains_until_its_tokens_are_committed(tmp_path):
    """A second start of it has nothing to do, whatever its steps. One with other keys and one that
    does not sign are refused before anything is compiled."""
    (tmp_path / "keys").mkdir()
    key = ssh_keys.make(tmp_path / "keys", "a")
    keys = island(tmp_path, "a", steps=150, log_period=10, checkpoint_period=50, islands_key=key)
    keys |= dict(eval_interval=40, eval_steps=1, learning_rate_schedule_steps=-1)
    run = train(tmp_path / "a", **keys)
    assert run.code == 0
    rows, log = run.rows, log_of(tmp_path)
    assert log.state.tokens >= 150 * 2 * 16 and [row["step"] for row in rows][:3] == [10, 20, 30]
    assert rows[-1]["islands/progress"] >= 1 and rows[-1]["islands/records"] == len(log.records)
    assert rows[-1]["eval/loss"] < rows[0]["learning/loss"]
    last = saved_steps(tmp_path / "a")[-1]
    assert last == rows[-1]["step"] and checkpoint_meta(tmp_path / "a", last)["records"] >= 1
    evaluated = [row for row in rows if "eval/loss" in row]
    assert 1 < len(evaluated) < len(rows)
    again = train(tmp_path / "a", **keys | dict(steps=300))
    assert again.code == 0
    assert "nothing to do: " in again.output and "learning rate's schedule" not in again.output
    for key, changes in (("diloco_sync_period", dict(diloco_sync_period=5)), ("islands_key", {})):
        run = train(tmp_path / "refused", **keys | dict(island_name="b") | changes)
        assert run.code == 2 and names_key(run.error, key)
        assert "programs ready" not in run.output
    assert islands.main(["audit", str(tmp_path / "store")]) == 0


def test_an_island_by_itself_trains_on_the_whole_global_batch(tmp_path, monkeypatch):
    """Four sequences in micro-batches of two: the losses of gradient accumulation, until a record
    changes the parameters, to a few roundings, since the compiler fuses the two loops differently.
    Another island with another global batch is refused."""
    monkeypatch.setattr(runtime, "THREADS", 1)  # both read the first two blocks in the same order
    keys = dict(steps=20, log_period=1, islands_period_seconds=3, checkpoint_period=1000)
    keys |= dict(ici_fsdp_parallelism=1)
    own = dict(islands_global_batch_size=4), dict(gradient_accumulation_steps=2)
    runs = [
        train(tmp_path / name, **island(tmp_path / name, "a", **keys | changes))
        for name, changes in zip(("global", "own"), own, strict=True)
    ]
    assert [run.code for run in runs] == [0, 0]
    shared, accumulated = (
        [row["learning/loss"] for row in run.rows if not row["islands/records"]] for run in runs
    )
    count = min(len(shared), len(accumulated), 8)
    assert shared[:count] == pytest.approx(accumulated[:count], rel=1e-5)
    assert len(set(shared[:count])) == count > 1
    assert {row["islands/batch_size"] for row in runs[0].rows} == {4}
    for line in (tmp_path / "global" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["perf/tokens_per_second"] * row["perf/step_time"] == pytest.approx(4 * 16)
    assert islands.main(["audit", str(tmp_path / "global" / "store")]) == 0
    for changes in ({}, dict(islands_global_batch_size=8)):
        refused = train(tmp_path / "b", **island(tmp_path / "global", "b", **keys | changes))
        assert refused.code == 2 and names_key(refused.error, "islands_global_batch_size")


@pytest.mark.full
def test_the_global_batch_stays_the_same_when_an_island_is_killed(started, tmp_path):
    """Islands a and b have 3 and 4 of 7 sequences; once b is killed, a has all 7. The last messages
    before the record of the death and at the end of the log say the same."""
    keys = ELASTIC | dict(steps=10**6, log_period=1, checkpoint_period=10**6)
    keys |= dict(islands_store=tmp_path / "store", islands_global_batch_size=7)
    a, b = (
        started.append(start_train(tmp_path / name, island_name=name, **keys)) or started[-1]
        for name in "ab"
    )
    a.wait_for_output("has 3 of 7 sequences")
    b.wait_for_output("step 400")
    b.popen.kill()
    a.wait_for_output("has 7 of 7 sequences")
    until = metrics_rows(tmp_path / "a")[-1]["step"] + 400
    a.wait_for_output(f"step {until}")
    a.popen.terminate()
    assert_exit_codes([a], 143)
    last, at_death = {}, {}
    for record in log_of(tmp_path).records:
        last |= {one.island: one.tokens / max(one.steps, 1) for one in record.members}
        if "b" in dict(record.dead):
            at_death = dict(last)
    assert at_death == {"a": 3 * 16, "b": 4 * 16} and last["a"] == 7 * 16
    sizes = [row["islands/batch_size"] for row in metrics_rows(tmp_path / "a")]
    changes = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
    assert changes[-2:] == [3, 7]
    assert {3, 4, 7} >= {row["islands/batch_size"] for row in metrics_rows(tmp_path / "b")} >= {4}
    assert islands.main(["audit", str(tmp_path / "store")]) == 0


@pytest.mark.full
def test_an_island_is_killed_and_comes_back_and_another_joins(started, tmp_path):
    """The others continue; the log adds up; an island that comes back is a new incarnation."""
    keys = ELASTIC | dict(steps=6000, log_period=50, checkpoint_period=200)
    keys |= dict(islands_store=tmp_path / "store")

    def start(name):
        started.append(start_train(tmp_path / name, island_name=name, **keys))
        return started[-1]

    a, first_b = start("a"), start("b")
    a.wait_for_output("island b has joined")
    first_b.wait_for_output("step 400")
    first_b.popen.kill()
    a.wait_for_output("island b is considered dead")
    b, c = start("b"), start("c")
    a.wait_for_output("island b has returned")
    a.wait_for_output("island c has joined")
    assert_exit_codes([b, c, a], 0, 0, 0)
    log = log_of(tmp_path)
    members = {(m.island, m.incarnation) for r in log.records for m in r.members}
    assert {("a", 1), ("b", 1), ("b", 2), ("c", 1)} <= members
    assert ("b", 1) in log.state.dead
