"""benchmarks/islands_storm.py for a minute: islands that are killed and stand still, over moto."""

import re

import pytest

from benchmarks import islands_storm

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
