"""What perf/step_time counts, and when a row is written."""

import types

import numpy as np
import pytest

from maxdiloco.flags import config
from maxdiloco.metrics.speed import StepClock
from maxdiloco.trainer import recorder


class Run:
    """The parts of a run; each takes the seconds given for it on a clock that stands still."""

    def __init__(self, monkeypatch, since_row=None, memory=None, bar=False, **seconds):
        self.now = 0.0
        self.lines = []
        self.written, self.resumed, self.notes = [], [], []
        self._seconds = seconds
        monkeypatch.setattr(recorder, "StepClock", lambda t: StepClock(t, clock=lambda: self.now))
        monkeypatch.setattr(recorder.time, "perf_counter", lambda: self.now)
        loss = {"loss": np.float32([1.5])}
        trainer = types.SimpleNamespace(
            extra_metrics=self._takes("extra", {"dcn/bytes_sent": 0.0}),
            eval_params=lambda state: None,
            saved_items=self._takes("save", {}),
            note=lambda state: {},
        )
        parts = types.SimpleNamespace(
            params={"w": np.zeros((2, 2))},
            shape=types.SimpleNamespace(tokens=8),
            mesh=types.SimpleNamespace(
                size=1,
                devices=np.array([types.SimpleNamespace(device_kind="cpu")]),
                local_devices=[types.SimpleNamespace(memory_stats=lambda: memory)],
            ),
            learning_rate=lambda t: 0.1,
            monitor=types.SimpleNamespace(
                replicas={0: [0]},
                check=self._takes("check", loss),
                take_mean_loss=lambda steps: np.float32([1.5]),
                loss_sums=lambda: [3.0],
                resume_losses=self.resumed.append,
            ),
            trainer=trainer,
            evaluation=self._takes(
                "evaluate", types.SimpleNamespace(metrics=lambda name: {f"eval/{name}loss": 2.0})
            ),
            of_replicas=None,
            sampler=None,
        )
        self.recorder = recorder.Recorder(
            config.load([], {}),
            parts,
            done=0,
            total=9,
            console=types.SimpleNamespace(line=self.lines.append, has_bar=bar),
            writer=types.SimpleNamespace(
                write=lambda t, row: self._takes("write", self.written.append(row))(),
                sync=self._takes("save", None),
                wall_time_s=1000.0,
            ),
            links=None,
            checkpointer=types.SimpleNamespace(
                steps=list,
                save=lambda t, items, note, **_: self._takes("save", self.notes.append(note))(),
            ),
            note={},
            data_metrics=lambda t: {},
            since_row=since_row,
            begun=0.0,
        )

    def _takes(self, what, result):
        def call(*args, **kwargs):
            self.now += self._seconds.get(what, 0.0)
            return result

        return call

    def times(self, steps, after=lambda t, state: None):
        """perf/step_time of rows at each of some steps, each of which takes one second."""
        state = types.SimpleNamespace(params=np.zeros(1))
        for t in range(1, steps + 1):
            self.now += 1.0
            self.recorder.log(t, state)
            after(t, state)
            self.recorder.write(t)
        return [row["perf/step_time"] for row in self.written]


@pytest.mark.parametrize("part", ["check", "extra", "write"])
def test_the_step_time_covers_all_that_a_log_costs(monkeypatch, part):
    """Written after the time was taken: in the next interval. Control: nothing costs anything."""
    assert Run(monkeypatch).times(3) == [1, 1, 1]
    first, *later = Run(monkeypatch, **{part: 0.25}).times(3)
    assert (first, later) == (1 if part == "write" else 1.25, [1.25, 1.25])


def test_an_evaluation_and_a_save_are_left_out_but_not_the_wait_for_others_before(monkeypatch):
    """Each of the two waits in `check` until all processes are there."""
    run = Run(monkeypatch, evaluate=50, save=70)
    times = run.times(3, lambda t, state: run.recorder.evaluate(t, state, {"": None}))
    assert times == [1, 1, 1]
    assert [row["eval/loss"] for row in run.written] == [2, 2, 2]

    run = Run(monkeypatch, save=70, check=0.25)
    times = run.times(2, lambda t, state: run.recorder.save(t, state))
    assert times == [1.25, 1.5]


def test_a_save_writes_the_rows_before_it(monkeypatch):
    run = Run(monkeypatch)
    state = types.SimpleNamespace(params=np.zeros(1))
    waited = []
    monkeypatch.setattr(recorder.Rows, "write_all", lambda rows: waited.append(True))
    run.recorder.save(1, state)
    assert waited == [True]


def test_a_line_says_how_long_the_rest_takes_unless_a_bar_does(monkeypatch):
    """Steps 1 and 2 of 9, of a second each."""
    for bar, left in ((False, ["8 s left", "7 s left"]), (True, ["8 tok/s", "8 tok/s"])):
        run = Run(monkeypatch, bar=bar)
        run.times(2)
        assert [line.split("  ")[-1] for line in run.lines] == left


def test_a_row_has_the_time_of_all_lives_of_the_run_and_the_memory_of_the_device(monkeypatch):
    """1000 s before; CPU devices have no figures of memory."""
    run = Run(monkeypatch, memory={"bytes_in_use": 5, "peak_bytes_in_use": 7, "other": 9})
    run.times(2)
    assert [row["perf/wall_time_s"] for row in run.written] == [1001, 1002]
    assert run.written[0]["device/memory_in_use_bytes"] == 5
    assert run.written[0]["device/memory_peak_bytes"] == 7
    run = Run(monkeypatch)
    run.times(1)
    assert not [name for name in run.written[0] if name.startswith("device/")]


def test_a_save_between_two_rows_notes_the_losses_since_the_last_one(monkeypatch):
    run = Run(monkeypatch)
    state = types.SimpleNamespace(params=np.zeros(1))
    run.now = 2.0
    run.recorder.log(2, state)
    run.recorder.save(3, state)
    assert run.notes == [{"since_row": {"row": 2, "loss": [3.0]}}]
    assert Run(monkeypatch, since_row=run.notes[0]["since_row"]).resumed == [[3.0]]
    assert run.resumed == []
