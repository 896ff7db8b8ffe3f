"""What the report reads of a run's folder, and what it refuses."""

import json

import numpy as np
import pytest
import synthetic_runs

from maxdiloco import report
from maxdiloco.errors import CheckpointError, ConfigError, DataError
from maxdiloco.page import run as run_lib

DEFAULTS = {"diloco_sync_period": 100, "enable_diloco": True}


def load(*runs, base="runs"):
    found = [str(each) for each in runs]
    return run_lib.load(found, base_output_directory=str(base), defaults=DEFAULTS)


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_null_is_not_finite_an_absent_metric_is_nothing_and_broken_lines_are_counted():
    """Half a line at the end is left out without a word."""
    text = lines({"step": 1, "a": 1.5, "b": 2}, {"step": 2, "a": None}, {"step": 5, "b": 3, "c": 4})
    steps, columns, notes = run_lib.parse(text.replace(b"null", b"NaN") + b'{"step": 6, "a"')
    nan, bad = np.nan, np.inf
    assert steps.tolist() == [1, 2, 5] and notes == []
    np.testing.assert_array_equal(columns["a"], [1.5, bad, nan])
    np.testing.assert_array_equal(run_lib.parse(text)[1]["a"], [1.5, bad, nan])
    np.testing.assert_array_equal(columns["b"], [2, nan, 3])
    np.testing.assert_array_equal(columns["c"], [nan, nan, 4])
    text = b'{"st\n[1]\n' + lines({"step": 3, "a": 1}, {"step": 3, "a": 2}, {"step": 4, "a": 3})
    steps, columns, notes = run_lib.parse(text)
    assert steps.tolist() == [3, 4] and columns["a"].tolist() == [1, 3]
    assert notes == [
        "2 broken lines of metrics.jsonl are left out.",
        "1 rows of metrics.jsonl repeat a step and are left out.",
    ]


def test_numbers_that_no_float_and_no_step_can_be_end_no_page():
    """A value that no float32 holds is not finite; a step below 0 or above 2^40 is broken."""
    values = {1: 10**400, 2: -(10**39), 3: 10**38, 2**40 + 1: 1, -1: 1, 4: 1}
    text = lines(*({"step": step, "a": value} for step, value in values.items()))
    steps, columns, notes = run_lib.parse(text)
    assert steps.tolist() == [1, 2, 3, 4]
    assert columns["a"].tolist() == [np.inf, np.inf, 1e38, 1]
    assert notes == ["2 broken lines of metrics.jsonl are left out."]


def test_lines_of_history_without_what_the_page_shows_are_left_out(tmp_path):
    broken = [{"event": "start"}, synthetic_runs.start(0) | {"until": "x"}]
    broken += [synthetic_runs.start(0, time=1e300), {"event": "end", "time": 10**400, "why": ""}]
    broken += [synthetic_runs.start(0, bytes_sent=[sent]) for sent in (None, "x", -1, 1e300)]
    kept = [synthetic_runs.start(0), synthetic_runs.end()]
    folder = synthetic_runs.write(tmp_path / "a", steps=1, history=[*broken, *kept])
    (run,) = load(folder)
    assert run.history == kept and "8 broken lines of history.jsonl are left out." in run.notes
    assert report.main([str(folder)]) == 0


def test_a_run_is_found_by_name_folder_and_checkpoint_with_its_config(tmp_path):
    """Younger keys have their defaults; runs of one name are told apart by their folders."""
    folder = synthetic_runs.write(tmp_path / "a")
    saved = synthetic_runs.checkpoint(folder, 50)
    for given in ("a", folder, saved):
        (run,) = load(given, base=tmp_path)
        assert (run.name, str(run.folder)) == ("a", str(folder))
        assert list(run.checkpoints) == [50]
    assert run.keys["diloco_sync_period"] == 20
    assert run.keys["enable_streaming_diloco"] is True
    assert run.keys["enable_diloco"] is True  # not in the file
    other = synthetic_runs.write(tmp_path / "x" / "a", config=None)
    run, unknown = load(folder, other)
    assert (run.name, unknown.name) == (f"{tmp_path.name}/a", "x/a") and unknown.keys is None
    assert "the folder has no config.yml" in unknown.notes[0]


def test_folders_that_are_no_run_are_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"RUN=.*: .* holds no metrics\.jsonl\. Give the"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(DataError, match=r"metrics\.jsonl holds no row yet\. Wait until"):
        load(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"RUN=nowhere: there is no .*Give the name of a run"):
        load("nowhere", base=tmp_path)
    folder = synthetic_runs.write(tmp_path / "a", steps=1)
    with pytest.raises(ConfigError, match=r"RUN=a: .*is given twice\. Give each run once"):
        load(folder, "a", base=tmp_path)


def test_the_program_writes_into_the_first_runs_folder_or_where_it_is_told(tmp_path, capsys):
    folder = synthetic_runs.write(tmp_path / "a")
    assert report.main(["a", f"base_output_directory={tmp_path}"]) == 0
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert report.main([str(folder), f"out={tmp_path}/b/page.html"]) == 0
    assert (tmp_path / "b/page.html").exists()
    assert report.main([]) == 0
    _, second, usage, *_ = capsys.readouterr().out.splitlines()
    assert second.startswith(f"{tmp_path}/b/page.html: 0.")
    assert usage.startswith("usage: python -m maxdiloco.report RUN [RUN ...]")


def test_a_watched_page_is_written_until_every_run_has_ended(tmp_path, monkeypatch, capsys):
    """It ends while the program sleeps: two pages that read themselves again, then a still one."""
    history = [synthetic_runs.start(0, until=200)]
    folder = synthetic_runs.write(tmp_path / "a", steps=20, history=history)
    pages = []

    def sleep(seconds):
        assert seconds == 7
        pages.append((folder / "report.html").read_text())
        if len(pages) == 2:
            synthetic_runs.append(folder / "history.jsonl", synthetic_runs.end())

    monkeypatch.setattr(report.time, "sleep", sleep)
    assert report.main([str(folder), "watch=7"]) == 0
    assert ['content="7"' in page for page in pages] == [True, True]
    assert "refresh" not in (folder / "report.html").read_text()
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("written again every 7 s until every run has ended") and "MB" in last


def test_the_program_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    synthetic_runs.write(tmp_path / "runs" / "a", steps=1)
    for name, H in (("b", 0), ("c", "abc")):
        config = synthetic_runs.CONFIG | {"diloco_sync_period": H}
        synthetic_runs.write(tmp_path / "runs" / name, steps=1, config=config)
    monkeypatch.chdir(tmp_path)
    for argv, message in {
        "a watch=soon": "watch=soon is no whole number of 0 or more: seconds",
        "b": "/b/config.yml has diloco_sync_period=0, num_diloco_fragments=4, num_communication",
        "a c": "has diloco_sync_period=abc, ",
        "out=x.html": "RUN is missing: give the name",
        "a width=3": "width=3 is not an option of report. Use key=value with one of out",
        "a out=x out=y": "out=y: out is given twice. Give it once.",
        "hdfs://bucket/a": "is on hdfs://",
        "a out=.": "out=. is not a file",
        "a base_output_directory=foo://x": "base_output_directory=foo://x is on foo://",
    }.items():
        assert report.main(argv.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
