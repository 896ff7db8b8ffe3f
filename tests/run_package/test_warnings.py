"""Warnings about keys that are seldom meant; defaults of the outer learning rate and momentum."""

import shlex

import optax
import pytest
from run import names_key, train

from maxdiloco.config import config
from maxdiloco.diloco import outer
from maxdiloco.run import settings as run_settings
from maxdiloco.run import warnings

CPU = dict(platform="cpu", num_devices=8, num_parameters=7 * 10**9)
# What is known when devices are there.
FACTS = {f"M={M}": dict(num_replicas=M, num_tokens=257) for M in (1, 2, 3, 4, 8)} | {
    "no devices": {},
    "7B on a CPU": CPU,
    "7B on a TPU": CPU | dict(platform="tpu"),
    "100M on a CPU": CPU | dict(num_parameters=10**8),
}
RECIPE = "configs/recipes/many_replicas.yml"
FEW = "steps={} diloco_sync_period=20 ".format
LAG = "diloco_outer_momentum=0.9"
NORMALISED = "'router={normalise_weights: true}'"
# The kind of line, keys, a name of FACTS, and the name that each line has. The rows after a warning
# are the other side of its condition, without a line.
LINES = [
    ("warning", "diloco_round_overlap=eager diloco_outer_optimizer=adam", "no devices",
     ["diloco_outer_optimizer"]),
    ("warning", "diloco_round_overlap=eager", "no devices", []),
    ("warning", "diloco_outer_optimizer=adam", "no devices", []),
    ("warning", "enable_streaming_diloco=true", "no devices",
     ["num_diloco_fragments"]),
    ("warning", "enable_streaming_diloco=true num_diloco_fragments=3", "no devices", []),
    ("warning", "steps=99", "no devices", ["diloco_sync_period"]),
    ("warning", "steps=100", "no devices", []),
    ("warning", "steps=99 enable_diloco=false", "no devices", []),
    ("warning", "steps=all", "no devices", []),
    ("warning", "compile_topology=v5e-16", "no devices",
     ["compile_topology"]),
    ("warning", "", "no devices", []),
    ("warning", "eval_dataset_path=/a eval_fraction=0.1", "no devices", ["eval_fraction"]),
    ("warning", "eval_dataset_path=/a", "no devices", []),
    ("warning", "eval_fraction=0.1", "no devices", []),
    ("warning", "opt_type=sgd adam_b2=0.5", "no devices", ["adam_b2"]),
    ("warning", "opt_type=sgd optimizer_memory_host_offload=true", "no devices",
     ["optimizer_memory_host_offload"]),
    ("warning", "opt_type=sgd", "no devices", []),
    ("warning", "muon_beta=0.5", "no devices", ["muon_beta"]),
    ("warning", "muon_beta=0.5 opt_type=muon", "no devices", []),
    ("warning", f"num_experts=4 {NORMALISED}", "no devices", ["num_experts_per_tok"]),
    ("warning", f"num_experts=4 num_experts_per_tok=2 {NORMALISED}", "no devices", []),
    ("warning", "num_experts=4", "no devices", []),
    ("", "", "M=1", ["enable_diloco"]),
    ("", "enable_diloco=false", "M=1", []),
    ("", "", "M=2", []),
    # A vocabulary of more than twice the tokenizer's tokens.
    ("", "vocab_size=32768", "M=2",
     ["vocab_size"]),
    ("", "vocab_size=514", "M=2", ["vocab_size"]),
    ("", "vocab_size=513", "M=2", []),
    ("", "vocab_size=514 dataset_type=synthetic", "M=2", []),
    # A large model on a CPU that nobody asked for: MaxText's default is tpu; eight emulated devices
    # were taken for 7B without a word.
    ("", "", "7B on a CPU",
     ["hardware"]),
    ("", "hardware=cpu", "7B on a CPU", []),
    ("", "", "7B on a TPU", []),
    ("", "quantization=int8", "100M on a CPU", ["quantization"]),
    ("", "quantization=int8", "7B on a TPU", []),
    ("", "", "100M on a CPU", []),
    # Many replicas at the defaults are pointed to their recipe.
    ("", "", "M=4", [RECIPE]),
    ("", "", "M=3", []),
    ("", "diloco_sync_period=19", "M=8", []),
    ("", RECIPE, "M=8", []),
    ("", "enable_diloco=false", "M=8", []),
    # A run of few rounds says what to expect.
    ("note", FEW(200), "no devices", ["diloco_sync_period"]),
    ("note", FEW(20), "no devices", ["diloco_sync_period"]),
    ("note", FEW(1980), "no devices", ["diloco_sync_period"]),
    ("note", FEW(2000), "no devices", []),
    ("note", FEW(1980) + LAG, "no devices", ["diloco_sync_period", "diloco_outer_momentum"]),
    ("note", FEW(2000) + LAG, "no devices", ["diloco_outer_momentum"]),
    ("note", FEW(3980) + LAG, "no devices", ["diloco_outer_momentum"]),
    ("note", FEW(4000) + LAG, "no devices", []),
    ("note", FEW(2000) + "diloco_outer_momentum=0.7", "no devices", []),
    ("note", FEW(19), "no devices", []),  # a warning of its own
    ("note", FEW("all"), "no devices", []),
    ("note", FEW(200) + "enable_diloco=false", "no devices", []),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "keys", "facts", "expected"), LINES)
def test_keys_that_are_seldom_meant_are_named_in_a_line(kind, keys, facts, expected):
    cfg, known = config.load(shlex.split(keys), {}), FACTS[facts]
    if not known:
        lines = warnings.lines(cfg)
    elif "platform" in known:
        lines = warnings.device_lines(cfg, **known)
    else:
        lines = warnings.run_lines(cfg, **known)
    found = [line for line in lines if line.startswith(kind)]
    assert len(found) == len(expected)
    assert all(names_key(line, key) for line, key in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("keys", "replicas", "rate", "momentum"),
    [
        ("", 1, 0.7, 0.6),
        ("", 3, 0.7, 0.6),
        ("", 4, 1.0, 0.6),
        ("", 8, 1.0, 0.6),
        ("diloco_aggregation=radial_directional_mean", 8, 0.7, 0.6),
        ("diloco_sync_period=500", 2, 0.7, 0.6),
        ("diloco_round_overlap=eager", 2, 0.7, 0.6),
        ("diloco_round_overlap=eager", 8, 0.4, 0.6),
        ("diloco_round_overlap=delayed", 8, 0.4, 0.6),
        ("opt_type=muon", 2, 0.7, 0.6),
        ("diloco_outer_optimizer=adam", 2, 0.7, 0.9),
        ("diloco_outer_lr=auto diloco_outer_momentum=auto", 2, 0.7, 0.6),
        ("diloco_outer_lr=0 diloco_outer_momentum=0.3", 8, 0.0, 0.3),  # what is given stays
    ],
)
def test_outer_rate_and_momentum_follow_mode_and_replicas(keys, replicas, rate, momentum):
    """docs/reference/results.md, loss by mode. And they are stored."""
    cfg = run_settings.with_replicas(config.load(keys.split(), {}), replicas)
    assert (cfg.diloco_outer_lr, cfg.diloco_outer_momentum) == pytest.approx((rate, momentum))
    assert config.from_dict(cfg.as_dict()).diloco_outer_lr == rate


@pytest.mark.parametrize(("slices", "rate"), [(2, 0.7), (4, 1.0)])
def test_the_outer_rate_follows_the_replicas_of_the_mesh(slices, rate, monkeypatch):
    """With num_diloco_replicas=auto the log has the rate, and the outer optimizer uses it."""
    given = []

    def seen(lr, momentum):
        given.append(lr)
        return optax.sgd(lr, momentum=momentum, nesterov=True)

    monkeypatch.setattr(outer, "OPTIMIZERS", dict(outer.OPTIMIZERS) | {"nesterov": seen})
    keys = dict(steps=4, show_fragments="true")
    run = train("a", dcn_diloco_parallelism=slices, **keys)
    assert f"diloco_outer_lr={rate} " in run.output
    assert set(given) == {rate}
