"""The plan where slots own parts of a fragment: what a period waits for, and what is proposed."""

import json

import pytest

from maxdiloco import plan
from maxdiloco.aot import wait


@pytest.mark.parametrize(
    ("seconds", "shared", "keys", "waited"),
    [
        # 0.4 s of parts have 2 steps of 0.2 s, then 0.8 s of means have the other 4.
        ([1.2], [0.8], dict(H=20, lag=6, scatter_steps=2), 0.0),
        ([1.2], [0.8], dict(H=20, lag=5, scatter_steps=2), 0.2),
        ([1.2], [0.8], dict(H=20, lag=5, scatter_steps=1), 0.2 + 0.0),
        ([1.2], [0.8], dict(H=20, lag=6, scatter_steps=2, latency_s=0.05), 0.05 + 0.05),
        ([1.2], [0.8], dict(H=20, lag=0, latency_s=0.05), 1.2 + 2 * 0.05),
    ],
)
def test_owners_wait_for_parts_and_then_for_means(seconds, shared, keys, waited):
    found = wait.exposed_s(seconds, (), shared, step_s=0.2, **keys)
    assert found == pytest.approx(waited)
    # Beside a step of a program the parts alone, where no step is left for the means.
    found = wait.exposed_s([0.5], [0.1], [0.4], [0.4], H=20, lag=1, scatter_steps=1, step_s=0.2)
    assert found == pytest.approx(0.4)


def test_a_plan_of_owners_keeps_them_and_never_proposes_eager(tmp_path, capsys):
    """On eight slices, at a link that is too slow to gather 4 bits beside 30 steps."""
    keys = ("model_name=1b", "compile_topology=v5e-16", "compile_topology_num_slices=8")
    keys += ("step_time=0.8", "dcn_bandwidth_gbps=0.04", "diloco_sync_period=30")
    waits = {}
    for exchange in ("gather", "owners"):
        path = tmp_path / f"{exchange}.json"
        plan.main([*keys, f"diloco_exchange={exchange}", f"report={path}"])
        found = json.loads(path.read_text())
        rows = [row for row in found["choices"] if row["mode"] == "overlapped"]
        assert {row["diloco_exchange"] for row in rows} == {exchange}
        waits[exchange] = min(row["exposed_seconds_per_period"] for row in rows)
        modes = {row["mode"] for row in found["choices"]}
        assert ("eager" in modes) == (exchange == "gather")
        assert f"diloco_exchange={exchange}" in capsys.readouterr().out
    assert waits["owners"] < 0.5 * waits["gather"]
