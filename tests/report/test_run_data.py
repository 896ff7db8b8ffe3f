"""The run folders that the report reads, and those that it refuses."""

import json

import numpy as np
import pytest
import synthetic_runs

from maxdiloco.errors import CheckpointError, ConfigError, DataError
from maxdiloco.report import __main__ as report
from maxdiloco.report import run_data

DEFAULTS = {"diloco_sync_period": 100, "enable_diloco": True}


def load(*runs, base="runs"):
    found = [str(each) for each in runs]
    return run_data.load(found, base_output_directory=str(base), defaults=DEFAULTS)


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_null_is_infinite_and_an_absent_metric_is_nan():
    """Half a line at the end is ignored."""
    text = lines({"step": 1, "a": 1.5, "b": 2}, {"step": 2, "a": None}, {"step": 5, "b": 3, "c": 4})
    steps, columns, notes = run_data.parse(text.replace(b"null", b"NaN") + b'{"step": 6, "a"')
    nan, bad = np.nan, np.inf
    assert steps.tolist() == [1, 2, 5] and notes == []
    np.testing.assert_array_equal(columns["a"], [1.5, bad, nan])
    np.testing.assert_array_equal(run_data.parse(text)[1]["a"], [1.5, bad, nan])
    np.testing.assert_array_equal(columns["b"], [2, nan, 3])
    np.testing.assert_array_equal(columns["c"], [nan, nan, 4])
    text = b'{"st\n[1]\n' + lines({"step": 3, "a": 1}, {"step": 3, "a": 2}, {"step": 4, "a": 3})
    steps, columns, notes = run_data.parse(text)
    assert steps.tolist() == [3, 4] and columns["a"].tolist() == [1, 3]
    assert [note[:2] for note in notes] == ["2 ", "1 "], "broken lines, repeated steps"


def test_numbers_that_no_float_and_no_step_can_be_end_no_page():
    """A value that no float32 holds is not finite; a step below 0 or above 2^40 is broken."""
    values = {1: 10**400, 2: -(10**39), 3: 10**38, 2**40 + 1: 1, -1: 1, 4: 1}
    text = lines(*({"step": step, "a": value} for step, value in values.items()))
    steps, columns, notes = run_data.parse(text)
    assert steps.tolist() == [1, 2, 3, 4]
    assert columns["a"].tolist() == [np.inf, np.inf, 1e38, 1]
    assert len(notes) == 1 and notes[0].startswith("2 ") and "metrics.jsonl" in notes[0]


def test_incomplete_lines_of_the_history_are_left_out(tmp_path):
    broken = [{"event": "start"}, synthetic_runs.start(0) | {"until": "x"}]
    broken += [synthetic_runs.start(0, time=1e300), {"event": "end", "time": 10**400, "why": ""}]
    broken += [synthetic_runs.start(0, bytes_sent=[sent]) for sent in (None, "x", -1, 1e300)]
    kept = [synthetic_runs.start(0), synthetic_runs.end()]
    folder = synthetic_runs.write(tmp_path / "a", steps=1, history=[*broken, *kept])
    (run,) = load(folder)
    assert run.history == kept
    assert any(note.startswith("8 ") and "history.jsonl" in note for note in run.notes)
    assert report.main([str(folder)]) == 0


def test_a_run_is_found_by_its_name_folder_or_checkpoint(tmp_path):
    """Younger keys have their defaults; runs of one name are told apart by their folders."""
    folder = synthetic_runs.write(tmp_path / "a")
    saved = synthetic_runs.checkpoint(folder, 50)
    for given in ("a", folder, saved):
        (run,) = load(given, base=tmp_path)
        assert (run.name, str(run.folder)) == ("a", str(folder))
        assert list(run.checkpoints) == [50]
    assert run.config["diloco_sync_period"] == 20
    assert run.config["enable_streaming_diloco"] is True
    assert run.config["enable_diloco"] is True  # not in the file
    other = synthetic_runs.write(tmp_path / "x" / "a", config=None)
    run, unknown = load(folder, other)
    assert (run.name, unknown.name) == (f"{tmp_path.name}/a", "x/a") and unknown.config is None
    assert "config.yml" in unknown.notes[0]


def test_a_folder_that_is_not_a_run_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"^RUN={tmp_path / 'empty'}: "):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(DataError, match=r"empty/metrics\.jsonl "):
        load(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="^RUN=nowhere: "):
        load("nowhere", base=tmp_path)
    folder = synthetic_runs.write(tmp_path / "a", steps=1)
    with pytest.raises(ConfigError, match="^RUN=a: "):
        load(folder, "a", base=tmp_path)


def test_the_page_is_written_to_the_first_run_or_to_out(tmp_path, capsys):
    folder = synthetic_runs.write(tmp_path / "a")
    assert report.main(["a", f"base_output_directory={tmp_path}"]) == 0
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert report.main([str(folder), f"out={tmp_path}/b/page.html"]) == 0
    assert (tmp_path / "b/page.html").exists()
    assert report.main([]) == 0
    _, second, *_ = capsys.readouterr().out.splitlines()
    assert second.startswith(f"{tmp_path}/b/page.html: 0.")


def test_an_argument_that_cannot_work_is_named(tmp_path, monkeypatch, capsys):
    synthetic_runs.write(tmp_path / "runs" / "a", steps=1)
    for name, H in (("b", 0), ("c", "abc")):
        config = synthetic_runs.CONFIG | {"diloco_sync_period": H}
        synthetic_runs.write(tmp_path / "runs" / name, steps=1, config=config)
    monkeypatch.chdir(tmp_path)
    for argv, named in {
        "b": "/b/config.yml has diloco_sync_period=0",
        "a c": "diloco_sync_period=abc",
        "out=x.html": "RUN",
        "a width=3": "width=3",
        "a out=x out=y": "out=y",
        "hdfs://bucket/a": "hdfs://bucket/a",
        "a out=.": "out=.",
        "a base_output_directory=foo://x": "base_output_directory=foo://x",
    }.items():
        assert report.main(argv.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert named in line
