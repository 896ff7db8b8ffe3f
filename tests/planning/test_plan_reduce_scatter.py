"""Time that a period waits for the link, and the plan with reduce-scatter."""

import pytest
from run import output_of
from tiers import full

from maxdiloco import train as train_program
from maxdiloco.diloco.combinations import RADIAL
from maxdiloco.diloco.quantize import NAMES as WIRES
from maxdiloco.engine.settings import ExchangeSettings
from maxdiloco.planning import link_model


@pytest.mark.parametrize(
    ("transfers", "keys", "waited"),
    [
        # Through host memory. Without overlap every second is waited for.
        (([1.0, 0.5],), dict(lag=0), 1.5),
        # Two steps of 0.2 s hide 0.4 s of each fragment.
        (([1.0, 0.5],), dict(lag=2), 0.6 + 0.1),
        (([1.0],), dict(lag=5), 0.0),
        (([1.0],), dict(lag=5, latency_s=0.05), 0.05),
        # Eager: a period of 4 s hides 3.9 s, and of 4.004 s all but 0.004. Two fragments fill the
        # queue for a thousand sends before the first one is waited for.
        (([3.9],), dict(lag=20), 0.0),
        (([4.004],), dict(lag=20), 0.004),
        (([2.002, 2.002],), dict(lag=20), 0.004),
        # A step that carries a chunk ends when it has arrived: of 0.3 s, and of 0.1 s, which hide.
        (([1.2], [0.3] * 4), dict(lag=4), 0.4),
        (([0.4], [0.1] * 4), dict(lag=4), 0.0),
        # Owners: 0.4 s of parts have 2 steps of 0.2 s, then 0.8 s of means have the other 4.
        (([1.2], (), [0.8]), dict(lag=6, scatter_steps=2), 0.0),
        (([1.2], (), [0.8]), dict(lag=5, scatter_steps=2), 0.2),
        (([1.2], (), [0.8]), dict(lag=5, scatter_steps=1), 0.2 + 0.0),
        (([1.2], (), [0.8]), dict(lag=6, scatter_steps=2, latency_s=0.05), 0.05 + 0.05),
        (([1.2], (), [0.8]), dict(lag=0, latency_s=0.05), 1.2 + 2 * 0.05),
        # Beside a step of a program the parts alone, where no step is left for the means.
        (([0.5], [0.1], [0.4], [0.4]), dict(lag=1, scatter_steps=1), 0.4),
    ],
)
def test_a_period_waits_for_what_no_step_hides(transfers, keys, waited):
    assert link_model.exposed_s(*transfers, H=20, step_s=0.2, **keys) == pytest.approx(waited)


def test_a_plan_keeps_the_exchange_that_is_given(planned):
    """On eight slices, at a link that is too slow to gather 4 bits beside 30 steps."""
    keys = ("model_name=1b", "compile_topology=v5e-16", "compile_topology_num_slices=8")
    keys += ("step_time=0.8", "dcn_bandwidth_gbps=0.04", "diloco_sync_period=30")
    waits = {}
    for exchange in ("all_gather", "reduce_scatter"):
        found, run = planned(*keys, f"diloco_collective={exchange}")
        rows = [row for row in found["candidates"] if row["mode"] == "overlapped"]
        assert {row["diloco_collective"] for row in rows} == {exchange}
        waits[exchange] = min(row["exposed_seconds_per_period"] for row in rows)
        assert f"diloco_collective={exchange}" in run.output
    assert waits["reduce_scatter"] < 0.5 * waits["all_gather"]


@pytest.mark.parametrize("slices", [2, 3, 8, full(16)])
def test_owners_are_proposed_only_where_a_thin_link_gains(planned, slices):
    """On a link that DiLoCo fits with fewer steps of overlap, or at all, when slices own parts: by
    name with three slices and 8 bits, by auto with more. Control: on a fast link auto comes first,
    and with two slices every row gathers."""
    keys = ("model_name=1b", "compile_topology=v5e-16", f"compile_topology_num_slices={slices}")
    keys += ("step_time=0.8", "details=true")
    thin = "dcn_bandwidth_gbps=0.05"
    if slices == 3:
        keys, thin = (*keys, "diloco_exchange_dtype=int8"), "dcn_bandwidth_gbps=0.03"
    found, run = planned(*keys, thin)
    best, owned = found["candidates"][0], slices > 2
    assert best["diloco_collective"] == ("reduce_scatter" if slices == 3 else "auto")
    assert ("diloco_collective=reduce_scatter" in found["train_command"]) == (slices == 3)
    assert (" rs " in run.output) == owned
    gathered, _ = planned(*keys, thin, "diloco_collective=all_gather")
    after = rating_of(best), rating_of(gathered["candidates"][0])
    assert after[0] < after[1] if owned else after[0] == after[1]
    found, _ = planned(*keys, "dcn_bandwidth_gbps=1000")
    assert found["candidates"][0]["diloco_collective"] == "auto"


@pytest.mark.parametrize("merge", ["mean", "radial_directional_mean"])
def test_eager_is_proposed_where_the_trainer_accepts_it(planned, merge):
    """On a link that only eager fits; rda needs the norms of whole outer gradients."""
    keys = ("model_name=tiny", "hardware=cpu", "dcn_diloco_parallelism=2")
    keys += (f"diloco_aggregation={merge}",)
    found, _ = planned(*keys, "step_time=0.2", "slice_bandwidth_gbps=0.001")
    modes = {row["mode"] for row in found["candidates"]}
    assert {"DiLoCo", "overlapped"} <= modes and ("eager" in modes) == (merge == "mean")
    output_of(train_program.main, *found["train_command"][3:], "show_fragments=true")


def test_auto_is_reduce_scatter_from_four_slices_on():
    """Not with settings that refuse it, nor with one step to travel. What is named stays."""

    def chosen(collective="auto", slices=4, tau=0, P=2, **options):
        settings = ExchangeSettings(
            num_replicas=slices,
            sync_period=8,
            num_fragments=P,
            overlap_steps=tau,
            collective=collective,
            **{"exchange_dtype": "int8"} | options,
        )
        return settings.resolve(num_slices=slices).collective

    scattered = chosen(), chosen(tau=2), chosen("reduce_scatter", slices=2)
    assert scattered == ("reduce_scatter",) * 3
    assert chosen(slices=3) == chosen("all_gather") == chosen(tau=1) == "all_gather"
    assert (chosen(tau=2, P=8), chosen(P=8)) == ("all_gather", "reduce_scatter")
    assert chosen(aggregation=RADIAL) == chosen(exchange_dtype="topk") == "all_gather"
    assert chosen(round_overlap="delayed") == "reduce_scatter"
    assert chosen(round_overlap="eager") == "all_gather"


def rating_of(row):
    """The order of a plan: fits the link, a short period, a short overlap, a wide wire format."""
    wire = WIRES.index(row["diloco_exchange_dtype"])
    times = row["diloco_sync_period"], row["num_communication_overlapping_steps"]
    return row["utilisation"] < 0.99, *times, wire
