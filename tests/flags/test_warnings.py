"""What is seldom meant and known only when devices and tokenizer are there."""

import pytest

from maxdiloco.flags import config, warnings


def lines(*keys, num_replicas=2, num_tokens=257):
    cfg = config.load(keys, {})
    return warnings.of_run(cfg, num_replicas=num_replicas, num_tokens=num_tokens)


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
        ("steps=200 diloco_sync_period=20", ["10 rounds", "diloco_outer_momentum=0.6"]),
        ("steps=200 diloco_sync_period=20 diloco_outer_momentum=0.6", ["10 rounds"]),
        ("steps=1980 diloco_sync_period=20", ["99 rounds", "diloco_outer_momentum=0.6"]),
        ("steps=2000 diloco_sync_period=20", []),
        ("steps=19 diloco_sync_period=20", []),  # a warning of its own
        ("steps=-1", []),
        ("steps=200 diloco_sync_period=20 enable_diloco=false", []),
    ],
)
def test_a_run_of_few_rounds_says_what_to_expect(keys, said):
    found = warnings.short_run(config.load(keys.split(), {}))
    assert len(found) == bool(said) and all(words in found[0] for words in said)
    assert ("Set diloco" in "".join(found)) == ("diloco_outer_momentum=0.6" in said)
