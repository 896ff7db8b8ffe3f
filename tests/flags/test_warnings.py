"""What is seldom meant and known only when devices and tokenizer are there."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from maxdiloco.flags import config, warnings


def lines(*keys, num_replicas=2, num_tokens=257):
    cfg = config.load(keys, {})
    return warnings.of_run(cfg, num_replicas=num_replicas, num_tokens=num_tokens)


def test_a_large_model_on_a_cpu_that_nobody_asked_for_is_a_warning():
    """MaxText's default is tpu; eight emulated devices were taken for 7B without a word."""

    def found(*keys, platform="cpu", size=7 * 10**9):
        cfg = config.load(keys, {})
        devices = np.array([SimpleNamespace(platform=platform)] * 8)
        return warnings.on_cpu(cfg, devices, size)

    (line,) = found()
    assert "takes this CPU, as 8 devices, for 7,000,000,000 parameters" in line
    assert "Set hardware=tpu or hardware=gpu" in line
    assert found("hardware=cpu") == found(platform="tpu") == found(size=10**8) == []


def test_one_replica_is_named_for_what_it_is():
    (line,) = lines(num_replicas=1)
    assert "is the Lookahead optimizer" in line.replace("which makes this the", "is the")
    assert "enable_diloco=false" in line
    assert lines("enable_diloco=false", num_replicas=1) == lines(num_replicas=2) == []


@pytest.mark.parametrize("vocab_size, warned", [(384, 0), (513, 0), (514, 1), (32768, 1)])
def test_a_vocabulary_far_above_the_tokenizers_is_a_warning(vocab_size, warned):
    found = lines(f"vocab_size={vocab_size}")
    assert len(found) == warned
    if vocab_size == 32768:
        assert "has 257 tokens: 99% of the embedding's rows are never trained" in found[0]
        assert "Use vocab_size=-1" in found[0]
    assert lines(f"vocab_size={vocab_size}", "dataset_type=synthetic") == []


@pytest.mark.parametrize(
    ("keys", "said"),
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
def test_a_run_of_few_rounds_says_what_to_expect(keys, said):
    found = warnings.short_run(config.load(["diloco_sync_period=20", *keys.split()], {}))
    assert len(found) == len(said)
    assert all(re.search(words, line) for words, line in zip(said, found, strict=True))
