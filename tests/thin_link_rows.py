"""Rows of the benchmark of thin links, made up."""

from benchmarks.link.grid import Row

SETUP = {
    "hosts": 2,
    "periods": 5,
    "other_periods": 5,
    "row_seconds": 300.0,
    "thinnest": "5",
    "delay_ms": 0.0,
    "loss_pct": 0.0,
    "fast_device_ms": 180.0,
    "tied_parameters": 0,
    "keys": {"model_name": "tiny", "diloco_sync_period": "20", "log_period": "20"}
    | {"num_diloco_fragments": "2", "num_communication_overlapping_steps": "4"},
}


def measured(mode, step_ms, **changes):
    """A row as `measure` returns it."""
    row = Row(mode, "float32", "program", "10")._asdict()
    return row | {
        "step_ms": step_ms,
        "period_ms": [step_ms],
        "steps": 20,
        "start_s": 10.0,
        "sent_per_step": [1000.0, 1200.0],
        "claimed_per_step": None,
        "peak_mbit": 9.5,
        "bars": [0, 125_000, 60_000],
        "parameters": 1_000_000,
        "fragment_bytes": [1_000_000, 500_000],
        "congestion": "reno",
        "commit": "abc",
    } | changes


PLAIN = measured("plain", 200.0, wire="", carrier="", rate="unlimited", sent_per_step=[90.0, 110.0])
