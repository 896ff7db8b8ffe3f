"""YaRN's ramp where it meets the first or the last pair of a head.

# I pairs of a head
"""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiloco.models.rope import RopeConfig, rotation


def stretches(**options):
    """What the frequencies of the four pairs of a head of 8 are multiplied by."""
    rope = RopeConfig(
        50.0, type="yarn", factor=4.0, original_length=64, attention_factor=1.0, **options
    )
    angles_I = np.arcsin(rotation(jnp.ones((1, 1)), 8, rope).sin_BLI[0, 0])
    return angles_I * 50.0 ** np.array([0, 0.25, 0.5, 0.75])


@pytest.mark.parametrize(
    ("borders", "ramp"),
    [
        # 64 tokens turn a pair 32 times at -1.2, so at pair 0; once at 2.4, so at pair 3.
        (dict(beta_fast=32.0, beta_slow=1.0), [0, 1 / 3, 2 / 3, 1]),
        # 0.001 times at 9.4, beyond the last number of a head, 7.
        (dict(beta_fast=32.0, beta_slow=0.001), [0, 1 / 7, 2 / 7, 3 / 7]),
        # 2 times at 1.66: a step.
        (dict(beta_fast=2.0, beta_slow=2.0, truncate=False), [0, 0, 1, 1]),
    ],
)
def test_yarn_divides_between_the_borders_and_within_the_head(borders, ramp):
    """1 where the ramp is 0, 1 / factor where it is 1."""
    np.testing.assert_allclose(stretches(**borders), 1 - 0.75 * np.array(ramp), rtol=1e-4)
