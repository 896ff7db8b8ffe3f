"""history.jsonl: a line for each start of a run and for how it ended."""

from types import SimpleNamespace

import pytest

from maxdiloco.errors import Preempted
from maxdiloco.metrics import history
from maxdiloco.metrics.history import History
from maxdiloco.trainer import start


def test_a_start_and_its_end_are_two_lines_and_the_next_start_adds_to_them(folder):
    assert history.read(folder) == []
    times = iter([10.0, 20.0, 30.0])
    with History(folder, {"step": 0, "processes": 2}, clock=lambda: next(times)):
        assert len(history.read(folder)) == 1
    History(folder, {"step": 5, "processes": 1}, clock=lambda: next(times))
    assert history.read(folder) == [
        {"event": "start", "time": 10.0, "step": 0, "processes": 2},
        {"event": "end", "time": 20.0, "why": ""},
        {"event": "start", "time": 30.0, "step": 5, "processes": 1},
    ]


def test_an_error_is_why_and_goes_on(folder):
    with pytest.raises(Preempted), History(folder, {}):
        raise Preempted("SIGTERM after\nstep 3")
    assert history.read(folder)[-1]["why"] == "Preempted: SIGTERM after\\nstep 3"


def test_half_a_line_of_a_killed_process_spoils_no_later_line(folder):
    folder.history.write_text('{"event": "sta')
    with History(folder, {"step": 7}):
        assert [event["event"] for event in history.read(folder)] == ["start"]


def test_a_folder_that_cannot_be_written_is_a_warning(folder):
    folder.history.mkdir()
    said = []
    with History(folder, {}, say=said.append):
        assert len(said) == 1
    assert [line.rpartition(": ")[2] for line in said] == ["Is a directory."] * 2
    assert said[0].startswith("warning: base_output_directory: cannot write ")


@pytest.mark.parametrize(("H", "sent"), [(3, [7, 8, 9]), (10**9, None)])
def test_the_line_of_a_start_has_the_bytes_of_the_third_period(folder, H, sent):
    """From the third on all exchanges of a period before are under way; a long one is cut."""
    trainer = SimpleNamespace(period=H, num_replicas=2, bytes_sent=lambda t: t)
    parts = SimpleNamespace(trainer=trainer, mesh=SimpleNamespace(size=4))
    with start.history_of(folder, parts, done=5, total=9):
        (line,) = history.read(folder)
    assert (line["step"], line["until"], line["replicas"], line["devices"]) == (5, 9, 2, 4)
    assert line["bytes_sent"] == sent or len(line["bytes_sent"]) == history.MOST_STEPS
