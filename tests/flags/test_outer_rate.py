"""What -1 stands for in the outer learning rate and momentum."""

import pytest

from maxdiloco import train
from maxdiloco.diloco import outer
from maxdiloco.flags import config


def loaded(*argv, replicas=2):
    cfg = config.with_replicas(config.load(list(argv), {}), replicas)
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


@pytest.mark.parametrize(
    ("keys", "replicas", "rate"),
    [
        ("", 1, 0.7),
        ("", 3, 0.7),
        ("", 4, 1.0),
        ("", 8, 1.0),
        ("diloco_merge=rda", 8, 0.7),
        ("diloco_outer_overlap=eager", 8, 0.7),
        ("diloco_outer_overlap=delayed", 8, 0.4),
        ("diloco_outer_lr=0.2", 8, 0.2),
    ],
)
def test_the_mean_of_four_replicas_and_more_takes_longer_steps(keys, replicas, rate):
    """The same table: 0.7 is best for two, 1 for four and eight, 0.7 for rda."""
    assert loaded(*keys.split(), replicas=replicas)[0] == rate


@pytest.mark.parametrize(("slices", "rate"), [(2, 0.7), (4, 1.0)])
def test_the_replicas_that_the_mesh_has_are_counted(slices, rate, capfd, monkeypatch):
    """num_diloco_replicas=-1: the user is told the rate, and the outer optimizer gets it."""
    given = []
    build = outer.outer_optimizer

    def seen(name, *, lr, momentum):
        given.append(lr)
        return build(name, lr=lr, momentum=momentum)

    monkeypatch.setattr(outer, "outer_optimizer", seen)
    argv = [f"dcn_diloco_parallelism={slices}", "model_name=tiny", "dataset_type=synthetic"]
    assert train.main([*argv, "hardware=cpu", "steps=4", "show_fragments=true"]) == 0
    assert f"diloco_outer_lr={rate} (default -1.0)" in capfd.readouterr().out
    assert given == [rate]


def test_a_value_that_is_given_stays():
    keys = ["opt_type=muon", "diloco_outer_lr=0", "diloco_outer_momentum=0.3"]
    assert loaded(*keys) == (0.0, 0.3)


def test_the_chosen_values_are_stored():
    cfg = config.with_replicas(config.load(["diloco_outer_overlap=delayed"], {}), 2)
    assert "diloco_outer_lr=0.4 (default -1.0)" in config.describe_differences(cfg)
    assert config.from_dict(cfg.as_dict()).diloco_outer_lr == 0.4


def test_an_outer_rate_below_zero_never_reaches_the_optimizer():
    with pytest.raises(ValueError, match="diloco_outer_lr=-1.0 .*must not be below 0"):
        outer.outer_optimizer("nesterov", lr=-1.0, momentum=0.9)
