"""What perf/step_time counts, and when a row is written."""

from unittest import mock

import numpy as np
import pytest

from maxdiloco.metrics.speed import StepClock
from maxdiloco.run import recorder

STATE = mock.Mock(params=np.zeros(1))


class Run:
    """The parts of a run; each takes the seconds given for it on a clock that stands still."""

    def __init__(self, monkeypatch, memory=None, **seconds):
        self.now = 0.0
        self.written = []
        self._seconds = seconds
        monkeypatch.setattr(recorder, "StepClock", lambda t: StepClock(t, clock=lambda: self.now))
        monkeypatch.setattr(recorder.time, "perf_counter", lambda: self.now)
        parts = mock.Mock(params={"w": np.zeros((2, 2))}, sampler=None)
        parts.shape.tokens, parts.shape.length, parts.mesh.size = 8, 8, 1
        parts.model.config = mock.Mock(num_query_heads=1, head_dim=1, num_layers=1, latent=None)
        parts.mesh.devices = np.array([mock.Mock(device_kind="cpu")])
        parts.mesh.local_devices = [mock.Mock(**{"memory_stats.return_value": memory})]
        parts.control.learning_rate = lambda rate, t: 0.1
        parts.control.tokens = lambda steps, step_tokens: len(steps) * step_tokens
        parts.monitor.replicas = {0: [0]}
        parts.monitor.check = self._takes("check", {"loss": np.float32([1.5])})
        parts.monitor.read_row.return_value = {"loss": np.float32([1.5])}
        parts.monitor.sums.return_value = {}
        parts.trainer.extra_metrics = self._takes("extra", {})
        parts.trainer.bytes_sent = lambda t: 0.0
        parts.trainer.checkpoint = self._takes("save", ({}, {}))
        parts.evaluation = self._takes("evaluate", mock.Mock(metrics=lambda *_: {"eval/loss": 2}))
        writer = mock.Mock(wall_time_s=1000.0, sync=self._takes("save", None))
        writer.write = lambda t, row: self._takes("write", self.written.append(row))()
        saver = mock.Mock(steps=list)
        saver.save = self._takes("save", None)
        self.recorder = recorder.Recorder(
            parts, done=0, total=9,
            console=mock.Mock(has_bar=False), writer=writer,
            messenger=None, checkpointer=saver, note={}, data_metrics=lambda t: {},
            since_row=None, begun=0.0, folder=None, profile=lambda t: None,
        )  # fmt: skip

    def _takes(self, what, result):
        def call(*args, **kwargs):
            self.now += self._seconds.get(what, 0.0)
            return result

        return call

    def times(self, steps, after=lambda t: None):
        """perf/step_time of rows at each of some steps, each of which takes one second."""
        for t in range(1, steps + 1):
            self.now += 1.0
            self.recorder.log(t, STATE)
            after(t)
            self.recorder.write(t)
        return [row["perf/step_time"] for row in self.written]


@pytest.mark.parametrize("part", ["check", "extra", "write"])
def test_the_step_time_covers_all_that_a_log_costs(monkeypatch, part):
    """Written after the time was taken: in the next interval. Control: nothing costs anything."""
    assert Run(monkeypatch).times(3) == [1, 1, 1]
    first, *later = Run(monkeypatch, **{part: 0.25}).times(3)
    assert (first, later) == (1 if part == "write" else 1.25, [1.25, 1.25])


def test_the_step_time_excludes_evaluations_and_saves(monkeypatch):
    """Each of the two waits in `check` until all processes are there. A save writes the rows before
    it."""
    run = Run(monkeypatch, evaluate=50, save=70)
    times = run.times(3, lambda t: run.recorder.evaluate(t, STATE, {"": None}))
    assert times == [1, 1, 1]
    assert [row["eval/loss"] for row in run.written] == [2, 2, 2]

    run = Run(monkeypatch, save=70, check=0.25)
    waited = []
    monkeypatch.setattr(recorder.RowCollector, "write_all", lambda rows: waited.append(True))
    times = run.times(2, lambda t: run.recorder.save(t, STATE))
    assert times == [1.25, 1.5] and waited


def test_a_row_has_the_time_of_all_sessions_and_device_memory(monkeypatch):
    """1000 s before; CPU devices have no figures of memory."""
    run = Run(monkeypatch, memory={"bytes_in_use": 5, "peak_bytes_in_use": 7, "other": 9})
    run.times(2)
    assert [row["perf/wall_time_s"] for row in run.written] == [1001, 1002]
    assert run.written[0]["device/memory_in_use_bytes"] == 5
    assert run.written[0]["device/memory_peak_bytes"] == 7
    run = Run(monkeypatch)
    run.times(1)
    assert not [name for name in run.written[0] if name.startswith("device/")]
