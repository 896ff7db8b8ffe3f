"""The benchmarks of islands for a minute: killed and stopped over moto, and unlike ones' loss."""

import re

import pytest

from benchmarks import islands_loss, islands_storm

pytestmark = pytest.mark.full


def test_a_storm_of_a_minute_leaves_a_log_that_adds_up(tmp_path, capsys):
    """Half of the work at least: with so few minutes much of it is still on its way."""
    pytest.importorskip("moto")
    argv = ["seconds=60", "faults_per_hour=240", "mbit=0", f"out={tmp_path}", "seed=3"]
    assert islands_storm.main([*argv, "boxes=2", "islands_period_seconds=3"]) == 0
    text = capsys.readouterr().out
    assert "all digests, weights, rejects and tokens agree" in text
    trained, committed, share = re.search(
        r"of ([\d,]+) tokens trained ([\d,]+) are in the log, ([\d.]+)%", text
    ).groups()
    assert float(share) > 50 and "3 faults in" in text


def test_islands_of_unequal_speed_train_to_the_end(tmp_path, capsys):
    argv = ["rows=equal,unlike", "seeds=1", "step_ms=40,20", "steps=300", f"out={tmp_path}"]
    argv += ["islands_period_seconds=1", "base_num_decoder_layers=1"]
    assert islands_loss.main(argv) == 0
    text = capsys.readouterr().out
    (loss,) = re.findall(r"^unlike: ([\d.]+) \([+-][\d.]+% to equal; ", text, re.M)
    assert 0 < float(loss) < 5 and text.count('"codes": {"box0": 0, "box1": 0}') == 2
    assert islands_loss.main(argv) == 0  # of what is in its folder already
    assert capsys.readouterr().out == text
