"""What -1 stands for in the outer learning rate and momentum."""

import pytest

from maxdiloco.diloco import outer
from maxdiloco.flags import config


def loaded(*argv):
    cfg = config.load(list(argv), {})
    return cfg.diloco_outer_lr, cfg.diloco_outer_momentum


@pytest.mark.parametrize(
    ("keys", "rate", "momentum"),
    [
        ("", 0.7, 0.6),
        ("diloco_sync_period=10", 0.7, 0.6),
        ("diloco_sync_period=500", 0.7, 0.6),
        ("diloco_outer_overlap=eager", 0.7, 0.6),
        ("diloco_outer_overlap=delayed", 0.4, 0.6),
        ("opt_type=muon", 0.7, 0.6),
        ("diloco_outer_optimizer=adam", 0.7, 0.9),
        ("diloco_outer_lr=-1 diloco_outer_momentum=-1", 0.7, 0.6),
    ],
)
def test_the_outer_rate_and_momentum_are_those_of_the_table(keys, rate, momentum):
    """benchmarks/README.md, what a mode costs in loss."""
    assert loaded(*keys.split()) == pytest.approx((rate, momentum))


def test_a_value_that_is_given_stays():
    keys = ["opt_type=muon", "diloco_outer_lr=0", "diloco_outer_momentum=0.3"]
    assert loaded(*keys) == (0.0, 0.3)


def test_the_chosen_values_are_told_and_stored():
    cfg = config.load(["diloco_outer_overlap=delayed"], {})
    assert "diloco_outer_lr=0.4 (default -1.0)" in config.describe_differences(cfg)
    assert config.from_dict(cfg.as_dict()).diloco_outer_lr == 0.4


def test_an_outer_rate_below_zero_never_reaches_the_optimizer():
    with pytest.raises(ValueError, match="diloco_outer_lr=-1.0 .*must not be below 0"):
        outer.outer_optimizer("nesterov", lr=-1.0, momentum=0.9)
