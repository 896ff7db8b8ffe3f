"""The benchmark of several replicas on one device: its cases and its ratio."""

import pytest

from benchmarks import replica_cost
from benchmarks.link.rows import RowError


def test_both_cases_read_as_many_tokens_a_step():
    _, cases = replica_cost.arguments(["hardware=cpu", "replicas=4", "num_diloco_fragments=3"])
    base, streaming = cases.values()
    assert base["per_device_batch_size"] == "32" and base["enable_diloco"] == "false"
    assert (streaming["per_device_batch_size"], streaming["num_diloco_replicas"]) == ("8", "4")
    assert streaming["num_diloco_fragments"] == "3" and "num_diloco_fragments" not in base
    assert base["steps"] == streaming["steps"] == "90" and base["log_period"] == "30"


def test_the_first_period_does_not_count():
    """Periods of equal tokens at 100 and 300 a second: 2 / (1/100 + 1/300) = 150."""
    rows = [{"perf/tokens_per_second": speed} for speed in (1.0, 100.0, 300.0)]
    assert replica_cost.tokens_per_second(rows) == pytest.approx(150.0)
    with pytest.raises(RowError, match="Use steps=2 or more"):
        replica_cost.tokens_per_second(rows[:1])


def test_a_run_that_fails_is_said_with_its_last_words(tmp_path):
    with pytest.raises(RowError, match="exit code 2. End of its output:(.|\n)*qqq=1"):
        replica_cost.measure({"qqq": "1"}, tmp_path, "a case")


def test_the_report_is_the_ratio_of_medians():
    words = replica_cost.report({"data parallel": [100.0, 120.0, 80.0], "streaming": [95.0]})
    assert words == "streaming / data parallel: tokens/s 0.950"
