"""What works but is seldom meant, and what -1 stands for in the outer rate and momentum."""

import re

import pytest

from maxdiloco import train
from maxdiloco.diloco import outer
from maxdiloco.flags import config, together


def said(kind, *keys, **facts):
    found = together.lines(config.load(keys, {}), **facts)
    return [line for line in found if line.startswith(kind)]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("diloco_outer_overlap=eager diloco_outer_optimizer=adam", ["=adam with", "Use nesterov"]),
        ("enable_streaming_diloco=true", ["num_diloco_fragments=1", "every three layers"]),
        ("steps=99", ["steps=99", "diloco_sync_period=100", "shorter period"]),
        ("compile_topology=v5e-16", ["compile_topology=v5e-16", "train_compile", "Leave it out"]),
        # The other side of each condition above.
        ("", []),
        ("diloco_outer_overlap=eager", []),
        ("diloco_outer_optimizer=adam", []),
        ("enable_streaming_diloco=true num_diloco_fragments=3", []),
        ("steps=100", []),
        ("steps=99 enable_diloco=false", []),
        ("steps=-1", []),
    ],
)
def test_what_works_but_is_seldom_meant_is_a_warning(flags, words):
    lines = said("warning: ", *flags.split())
    assert len(lines) == bool(words)
    assert all(word in line for line in lines for word in words)


def lines(*keys, num_replicas=2):
    return said("", *keys, num_replicas=num_replicas, num_tokens=257)


def on_cpu(*keys, platform="cpu", size=7 * 10**9):
    return said("", *keys, platform=platform, num_devices=8, num_parameters=size)


def test_one_replica_a_vocabulary_far_above_the_tokenizers_and_a_cpu_are_warnings():
    """A large model on a CPU that nobody asked for: MaxText's default is tpu; eight emulated
    devices were taken for 7B without a word."""
    (line,) = lines(num_replicas=1)
    assert "is the Lookahead optimizer" in line.replace("which makes this the", "is the")
    assert "enable_diloco=false" in line
    assert lines("enable_diloco=false", num_replicas=1) == lines(num_replicas=2) == []
    assert lines("vocab_size=513") == lines("vocab_size=514", "dataset_type=synthetic") == []
    assert len(lines("vocab_size=514")) == 1
    (line,) = lines("vocab_size=32768")
    assert "has 257 tokens: 99% of the embedding's rows are never trained" in line
    assert "Use vocab_size=-1" in line
    (line,) = on_cpu()
    assert "takes this CPU, as 8 devices, for 7,000,000,000 parameters" in line
    assert "Set hardware=tpu or hardware=gpu" in line
    assert on_cpu("hardware=cpu") == on_cpu(platform="tpu") == on_cpu(size=10**8) == []


def test_many_replicas_at_the_defaults_are_pointed_to_their_recipe():
    (line,) = lines(num_replicas=4)
    name = re.search(r"configs/recipes/\w+\.yml", line)[0]
    assert line.startswith("note: 4 replicas cost more loss")
    assert lines(num_replicas=3) == lines("diloco_sync_period=19", num_replicas=8) == []
    assert lines(name, num_replicas=8) == lines("enable_diloco=false", num_replicas=8) == []


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("steps=200", ["10 rounds of diloco_sync_period=20, few to judge"]),
        ("steps=20", ["1 round of"]),
        ("steps=1980", ["99 rounds of diloco_sync_period=20, few to judge"]),
        ("steps=2000", []),
        ("steps=1980 diloco_outer_momentum=0.9", ["few to judge", "few for diloco_outer_mom"]),
        ("steps=2000 diloco_outer_momentum=0.9", ["100 rounds .*_momentum=0.9: .*Set .*_lr=0.7"]),
        ("steps=3980 diloco_outer_momentum=0.9", ["199 rounds .*_momentum=0.9"]),
        ("steps=4000 diloco_outer_momentum=0.9", []),
        ("steps=2000 diloco_outer_momentum=0.7", []),
        ("steps=19", []),  # a warning of its own
        ("steps=-1", []),
        ("steps=200 enable_diloco=false", []),
    ],
)
def test_a_run_of_few_rounds_says_what_to_expect(keys, expected):
    found = said("note: ", "diloco_sync_period=20", *keys.split())
    assert len(found) == len(expected)
    assert all(re.search(words, line) for words, line in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("keys", "replicas", "rate", "momentum"),
    [
        ("", 1, 0.7, 0.6),
        ("", 3, 0.7, 0.6),
        ("", 4, 1.0, 0.6),
        ("", 8, 1.0, 0.6),
        ("diloco_merge=rda", 8, 0.7, 0.6),
        ("diloco_sync_period=500", 2, 0.7, 0.6),
        ("diloco_outer_overlap=eager", 2, 0.7, 0.6),
        ("diloco_outer_overlap=eager", 8, 0.4, 0.6),
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
    """num_diloco_replicas=-1: the user is told the rate, and the outer optimizer gets it, which
    takes none below 0."""
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
    with pytest.raises(ValueError, match="diloco_outer_lr=-1.0 .*must not be below 0"):
        build("nesterov", lr=-1.0, momentum=0.9)
