"""maxdiloco.train as islands over a folder: alone, side by side, killed, and later than others."""


import process_tools
import pytest
import run_tools as tools
import ssh_keys

from maxdiloco.islands import __main__ as islands
from maxdiloco.islands import audit, objects

pytestmark = [pytest.mark.usefixtures("programs")]
ALONE = dict(dcn_diloco_parallelism=1, islands_period_seconds=0.1, islands_dead_seconds=3)
# One device, one layer, as of process_tools, which has two replicas.
ELASTIC = dict(dcn_diloco_parallelism=1, ici_fsdp_parallelism=1, diloco_sync_period=4)
ELASTIC |= dict(islands="elastic", islands_period_seconds=1, islands_dead_seconds=3)


def island(folder, name, **changes):
    """The keys of an island."""
    return dict(islands="elastic", islands_store=folder / "store", island=name) | ALONE | changes


def log_of(folder, fragment=0):
    bucket = objects.open_bucket(str(folder / "store"))
    return audit.replay(bucket, audit.read_run(bucket), fragment)


def test_an_island_trains_until_its_tokens_are_committed(tmp_path, capsys):
    """And a second start of it, which changes no rate by its steps, one with other keys and one
    that does not sign have nothing to do there."""
    (tmp_path / "keys").mkdir()
    key = ssh_keys.make(tmp_path / "keys", "a")
    keys = island(tmp_path, "a", steps=150, log_period=10, checkpoint_period=50, islands_key=key)
    keys |= dict(eval_interval=40, eval_steps=1, learning_rate_schedule_steps=-1)
    text = tools.told(capsys, tmp_path, "a", **keys)
    assert "island a is in, its start number 1: 0 records, 0 tokens committed, 0.0 %" in text
    rows, log = tools.rows(tmp_path / "a"), log_of(tmp_path)
    assert log.ledger.tokens >= 150 * 2 * 16 and [row["step"] for row in rows][:3] == [10, 20, 30]
    assert rows[-1]["islands/progress"] >= 1 and rows[-1]["islands/records"] == len(log.records)
    assert rows[-1]["eval/loss"] < rows[0]["learning/loss"]
    last = tools.saved_steps(tmp_path / "a")[-1]
    assert last == rows[-1]["step"] and tools.meta(tmp_path / "a", last)["records"] >= 1
    evaluated = [row for row in rows if "eval/loss" in row]
    assert 1 < len(evaluated) < len(rows)
    text = tools.told(capsys, tmp_path, "a", **keys | dict(steps=300))
    assert "nothing to do: " in text and "learning rate's schedule" not in text
    other = keys | dict(diloco_sync_period=5, island="b")
    code, line = refused(tmp_path, capsys, other)
    assert code == 2 and "diloco_sync_period=5 here, and 4 in the run of islands_store=" in line
    code, line = refused(tmp_path, capsys, keys | dict(island="b"))
    assert code == 2 and "its islands_key is not that of b in the run's keys (a)" in line
    assert islands.main(["audit", str(tmp_path / "store")]) == 0


def refused(folder, capsys, keys):
    capsys.readouterr()
    code = tools.run(folder, "refused", **keys)
    said = capsys.readouterr()
    assert "programs ready" not in said.out, "nothing is compiled for it"
    return code, said.err.strip()


@pytest.mark.full
def test_an_island_is_killed_and_comes_back_and_another_joins(started, tmp_path):
    """The others go on; the log adds up; who comes back is a new incarnation."""
    changes = ELASTIC | dict(
        steps=6000, log_period=50, base_output_directory=tmp_path, checkpoint_period=200,
        islands_store=tmp_path / "store",
    )  # fmt: skip

    def start(name, log):
        keys = changes | dict(island=name, run_name=name)
        started.append(process_tools.trainer(keys, tmp_path / f"{log}.log"))
        return started[-1]

    a, first_b = start("a", "a"), start("b", "b")
    a.wait_for("island b is there")
    first_b.wait_for("step 400")
    first_b.popen.kill()
    a.wait_for("island b is thought dead")
    b, c = start("b", "b2"), start("c", "c")
    a.wait_for("island b is back")
    a.wait_for("island c is there")
    process_tools.ends([b, c, a], 0, 0, 0)
    log = log_of(tmp_path)
    members = {(m.island, m.incarnation) for r in log.records for m in r.members}
    assert {("a", 1), ("b", 1), ("b", 2), ("c", 1)} <= members
    assert ("b", 1) in log.ledger.dead
    assert "island b is in, its start number 2" in b.text()
