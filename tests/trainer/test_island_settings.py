"""What islands agree on, and the lines where they do not."""

import pytest
from test_on_islands import ELASTIC

from maxdiloco.errors import ConfigError
from maxdiloco.flags import config
from maxdiloco.trainer import island_settings
from maxdiloco.trainer.island_settings import Facts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wire": "int8"}, "diloco_exchange_dtype=int8 here, and float32 in the run of islands_st"),
        ({"sync_period": 5}, "diloco_sync_period=5 here, and 4 in the run of"),
        ({"data": "data_shuffle_seed=1"}, "data_shuffle_seed=1 here, and 0 in the run of"),
        ({"model": "base_emb_dim=64 head_dim=8"}, "base_emb_dim=64 here, and 128 in the run of"),
        ({"islands": ("a",)}, "islands=fixed here, and elastic in the run of"),
        ({"eval_tokens": 48}, "eval_interval=12 here, and -1 in the run of"),
        ({"model": "head_dim=8 num=1 all=ab"}, "num=1 here, and default in the run of"),
    ],
)
def test_an_island_with_other_keys_is_refused_by_name(changes, words):
    """Texts of run.json are key=value words; what is not said is the default of base.yml."""
    stored = ELASTIC._replace(model="head_dim=8", data="default", tokens=7)
    own = stored._replace(tokens=9, **changes)
    with pytest.raises(ConfigError, match=f"^{words}.*Set .*, or use another islands_store"):
        island_settings.adopted(own, stored, "s3://b/r", 4)
    assert island_settings.adopted(stored._replace(tokens=9), stored, "u", 4).tokens == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"islands_min": 3, "islands": ("0", "1", "2"), "tokens": 1200, "outer_lr": 1.0},
         "islands_min=3 here, and 2 in the run of s. Set islands_min=2,"),
        ({"tokens": 1600}, "steps=200 here, and 100 in the run of s. Set steps=100,"),
        ({"data": "sequences_per_replica=2", "tokens": 1600},
         "sequences_per_replica=2 here, and 1 in the run of s. Change per_device_batch_size or "),
        ({"model": "a=1 all=cd"}, "all=cd here, and ab in the run of s. These are fingerprints "),
    ],
)  # fmt: skip
def test_a_fixed_island_with_other_keys_is_refused_in_their_units(changes, words):
    """Two islands of 100 steps of 4 tokens."""
    both = dict(islands=("0", "1"), islands_min=2, block_tokens=0, tokens=800)
    stored = ELASTIC._replace(data="sequences_per_replica=1", model="a=1 all=ab", **both)
    with pytest.raises(ConfigError) as refusal:
        island_settings.adopted(stored._replace(**changes), stored, "s", 4)
    assert str(refusal.value).startswith(words.replace("of s.", "of islands_store=s."))


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (", weight: 1.5", ", weight: 0.5", "a:1,b:3"),
        (", weight: 3", ", weight: 1", "a:1,b:3"),
        (", weight: 1", ", weight: 3", "a:3,b:1"),
        ("", "", "b,a"),
    ],
)
def test_the_shares_of_a_mixture_are_of_the_run(first, second, word):
    """Weights in the same proportion are the same; for sources of their own the order counts."""
    mixture = f"[{{path: p, name: b{first}}}, {{path: q, name: a{second}}}]"
    mode = ["islands=elastic", "island=a"]
    if not first:
        mode = ["islands=fixed", "islands_min=2", "island=0", "dataset_per_replica=true"]
    cfg = config.load([f"dataset_mixture={mixture}", *mode, "islands_store=s"], {})
    words = island_settings.of(cfg, Facts("d", "t", 100, 4, 4, print)).run.data.split()
    assert f"dataset_mixture={word}" in words
