"""How long training waits for the link, and what its device holds meanwhile, by hand."""

import pytest

from maxdiloco.flags import config
from maxdiloco.planning import choices, exposure, job, rating

ONE_B = ("model_name=1b", "compile_topology=v5e-16", "compile_topology_num_slices=2")


@pytest.mark.parametrize(
    ("seconds", "keys", "waited"),
    [
        # Without overlap every second is waited for.
        ([1.0, 0.5], dict(H=20, lag=0), 1.5),
        # Two steps of 0.2 s hide 0.4 s of each fragment.
        ([1.0, 0.5], dict(H=20, lag=2), 0.6 + 0.1),
        ([1.0], dict(H=20, lag=5), 0.0),
        ([1.0], dict(H=20, lag=5, latency_s=0.05), 0.05),
        # Eager: a period of 4 s hides 3.9 s, and of 4.004 s all but 0.004. Two fragments fill the
        # queue for a thousand sends before the first one is waited for.
        ([3.9], dict(H=20, lag=20), 0.0),
        ([4.004], dict(H=20, lag=20), 0.004),
        ([2.002, 2.002], dict(H=20, lag=20), 0.004),
    ],
)
def test_what_a_period_waits_for_through_host_memory(seconds, keys, waited):
    assert exposure.host_exposed_s(seconds, step_s=0.2, **keys) == pytest.approx(waited)


def test_a_step_that_carries_a_chunk_ends_when_it_has_arrived():
    """Four chunks of 0.3 s in steps of 0.2 s, and of 0.1 s, which all hide."""
    assert exposure.program_exposed_s([0.3] * 4, step_s=0.2) == pytest.approx(0.4)
    assert exposure.program_exposed_s([0.1] * 4, step_s=0.2) == 0


def of_config(*argv):
    return job.of(config.load(argv, {}))


@pytest.mark.parametrize(
    ("memory", "carrier", "models"),
    [("pinned_host", "program", 0.06), ("pinned_host", "host", 0), ("device", "program", 5)],
)
def test_of_what_is_in_flight_on_the_host_the_chunks_of_two_steps_are_on_the_device(
    memory, carrier, models
):
    """Eager with H=100 sends a hundredth of the model's float32 a step, and gets two replicas';
    through host memory no step does. Control: on the device theta, momentum and three whole models
    are beside the step."""
    found = of_config(*ONE_B, f"exchange_carrier={carrier}")
    model = 4 * found.num_parameters / 16
    choice = choices.Choice(100, 1, 1, 0, "float32", "eager", streaming=False, memory=memory)
    row = rating.rated(found, choice, step=rating.Step(1.5, 10**9), gbps=25)
    assert row.memory - 10**9 == pytest.approx(models * model, rel=0.02)
