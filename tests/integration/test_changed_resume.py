"""A run whose command line changes between two starts: what it does then, and what it says."""

import shutil

import pytest
import run_tools as tools

pytestmark = [pytest.mark.usefixtures("programs"), pytest.mark.slow]


def test_the_same_text_by_another_path_resumes_and_other_text_in_its_place_does_not(
    text_run, tmp_path, capfd
):
    run, keys = text_run
    shutil.copytree(run, tmp_path / "text")
    moved = tmp_path / "moved.txt"
    moved.write_bytes(keys["dataset_path"].read_bytes())
    keys = keys | dict(dataset_path=moved, steps=5)
    capfd.readouterr()
    assert tools.run(tmp_path, "text", **keys) == 0
    out = capfd.readouterr().out
    assert "resumed after step 4" in out and "dataset_path /" in out
    moved.write_bytes(moved.read_bytes()[::-1])
    assert tools.run(tmp_path, "text", **keys | dict(steps=6)) == 2
    line = capfd.readouterr().err
    assert f"dataset_path={moved}: the text is not that of the checkpoint of step 5" in line
    assert f"load_parameters_path={tmp_path}/text/checkpoints/5" in line
