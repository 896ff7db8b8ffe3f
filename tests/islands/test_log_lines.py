"""Log lines of an island: a store that cannot be written, messages it waits for, other islands."""

import queue
import threading

import pytest
from together import PACE, a_run, begun, heads, with_threads

from maxdiloco.errors import ConfigError
from maxdiloco.islands import log_store, runtime, state_machine, store_check
from maxdiloco.islands.records import Heartbeat
from maxdiloco.islands.state_machine import ListHeartbeats
from maxdiloco.storage import store


class FullDisk:
    """A bucket that can be read, and while it is full not be written."""

    def __init__(self):
        self.bucket, self.full = store.in_memory(), False

    def __getattr__(self, name):
        if self.full and name in ("put", "put_if", "delete"):
            raise OSError(28, "No space left on device")
        return getattr(self.bucket, name)


def test_a_store_that_is_full_is_away_until_something_is_written():
    """Both islands say so once, nobody is thought dead of it, and it is back for both."""
    bucket = FullDisk()
    group = begun(a_run(block_tokens=64), "ab", 3, bucket=bucket)
    bucket.full = True
    start = group.now
    group.until(lambda _: group.now >= start + 3 * PACE.dead)
    said = {name: list(one.said) for name, one in group.islands.items()}
    assert all(lines.count(state_machine.AWAY) == 1 for lines in said.values())
    bucket.full, before = False, heads(group.islands.values())
    group.until_records(max(before) + 3)
    for name, one in group.islands.items():
        assert len([line for line in one.said[len(said[name]) :] if "store" in line]) == 1
        assert one.stop is None and not any(log.state.dead for log in one.state.logs)


def test_an_island_that_waits_says_for_what(monkeypatch):
    monkeypatch.setattr(runtime, "WAIT_LINE_S", 0.5)
    said, ended = queue.Queue(), threading.Event()
    one = with_threads(a_run(block_tokens=64, islands_min=2), say=said.put)

    def train():
        while not ended.is_set():
            one.wait_to_step()
            one.step_done(8)

    trains = threading.Thread(target=train)
    trains.start()
    try:
        line = said.get(timeout=20)
    finally:
        ended.set()
        one.close(drain=False)
    trains.join()
    assert "island a " in line and " 2 islands" in line and said.empty()


def test_an_island_of_last_week_is_not_there():
    """Its sign of life is still in the store; it is there once that has changed."""
    (one,) = begun(a_run(), "a", 1).islands.values()
    company = runtime.Members("a")

    def lines(beat):
        one.state._listed(ListHeartbeats(), {"b": beat})
        return company.lines(one.state)

    old = Heartbeat("b", 1, 7, (1, 1), 1.0, False)
    assert lines(old) == []
    one.state.now += 1.0
    (line,) = lines(old._replace(count=8))
    assert "island b " in line


def test_a_store_that_replaces_what_is_there_is_refused():
    bucket = store.in_memory()
    store_check.require_rights(bucket, "u", "a")
    bucket.put_if = lambda name, data, version: {"e_tag": "1"}
    with pytest.raises(ConfigError, match="islands_store=u "):
        store_check.require_rights(bucket, "u", "a")


def test_a_store_of_the_home_folder_is_there(tmp_path, monkeypatch):
    """As with every key that is a path; a shell leaves `islands_store=~/x` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    log_store.open_bucket("~/runs").put("hb/a", b"")
    assert (tmp_path / "runs" / "hb" / "a").exists()
