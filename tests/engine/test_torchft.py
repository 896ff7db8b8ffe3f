"""DiLoCo and Streaming DiLoCo against torchft 0.2.0, an independent implementation.

torchft_trajectories.py wrote the expected values, with the settings of torchft's regression test.
"""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from engine.torchft_trajectories import INNER_LR, START, STEPS, SYNC_PERIOD, TARGETS

from maxdiloco import DiLoCo

CASES = json.loads(pathlib.Path(__file__).with_name("torchft_trajectories.json").read_text())


def inner_step(x_F, opt_state, target_F):
    new = [x - INNER_LR * (x - target) for x, target in zip(x_F, target_F, strict=True)]
    return new, opt_state, {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"tau{case['tau']}_alpha{case['alpha']}")
def test_every_step_has_the_values_of_torchft(case):
    tau, P = case["tau"], len(START)
    # torchft applies fragment p after steps (p + 1) H / P and sends it tau steps earlier.
    offsets = [((p + 1) * SYNC_PERIOD // P - tau) % SYNC_PERIOD for p in range(P)]
    algorithm = DiLoCo(
        inner_step,
        num_replicas=2,
        sync_period=SYNC_PERIOD,
        num_fragments=P,
        overlap_steps=tau,
        alpha=case["alpha"],
        outer_lr=0.7,
        outer_momentum=0.9,
        offsets=offsets,
    )
    state = algorithm.init([jnp.array([x]) for x in START], ())
    batch = list(np.array(TARGETS, np.float32).T[:, :, None])
    params, outer = [], []
    for _ in range(STEPS):
        state, _ = algorithm.step(state, batch)
        params.append(np.stack(state.params)[..., 0].T)
        outer.append(np.stack(state.outer)[..., 0])
    # Rounding in float32: the values are near 1, and torch orders operations in another way.
    np.testing.assert_allclose(params, case["params"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(outer, case["outer"], rtol=0, atol=1e-6)
