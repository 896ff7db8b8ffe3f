"""What -1 stands for in the outer learning rate and momentum."""

import pytest

from maxdiloco import train
from maxdiloco.diloco import outer
from maxdiloco.flags import config


@pytest.mark.parametrize(
    ("keys", "replicas", "rate", "momentum"),
    [
        ("", 1, 0.7, 0.6),
        ("", 3, 0.7, 0.6),
        ("", 4, 1.0, 0.6),
        ("", 8, 1.0, 0.6),
        ("diloco_merge=rda", 8, 0.7, 0.6),
        ("diloco_sync_period=500", 2, 0.7, 0.6),
        ("diloco_outer_overlap=eager", 8, 0.7, 0.6),
        ("diloco_outer_overlap=delayed", 8, 0.4, 0.6),
        ("opt_type=muon", 2, 0.7, 0.6),
        ("diloco_outer_optimizer=adam", 2, 0.7, 0.9),
        ("diloco_outer_lr=-1 diloco_outer_momentum=-1", 2, 0.7, 0.6),
        ("diloco_outer_lr=0 diloco_outer_momentum=0.3", 8, 0.0, 0.3),  # what is given stays
    ],
)
def test_the_outer_rate_and_momentum_are_those_of_the_table(keys, replicas, rate, momentum):
    """benchmarks/README.md, what a mode costs in loss. And they are stored."""
    cfg = config.with_replicas(config.load(keys.split(), {}), replicas)
    assert (cfg.diloco_outer_lr, cfg.diloco_outer_momentum) == pytest.approx((rate, momentum))
    assert config.from_dict(cfg.as_dict()).diloco_outer_lr == rate


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


def test_an_outer_rate_below_zero_never_reaches_the_optimizer():
    with pytest.raises(ValueError, match="diloco_outer_lr=-1.0 .*must not be below 0"):
        outer.outer_optimizer("nesterov", lr=-1.0, momentum=0.9)
