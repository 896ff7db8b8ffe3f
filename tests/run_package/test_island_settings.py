"""What islands of a run agree on, and the keys that are named when they do not."""

import pytest
from maxdiloco.run.island.settings import Facts
from test_island_trainer import ELASTIC

from maxdiloco.config import config
from maxdiloco.errors import ConfigError
from maxdiloco.run.island import settings as island_settings


@pytest.mark.parametrize(
    ("changes", "here", "there"),
    [
        ({"wire": "int8"}, "diloco_exchange_dtype=int8", "float32"),
        ({"sync_period": 5}, "diloco_sync_period=5", "4"),
        ({"data": "data_shuffle_seed=1"}, "data_shuffle_seed=1", "0"),
        ({"model": "base_emb_dim=64 head_dim=8"}, "base_emb_dim=64", "128"),
        ({"islands_min": 2}, "islands_min_members=2", "1"),
        ({"eval_tokens": 48}, "eval_interval=12", "-1"),
        ({"model": "head_dim=8 num=1 all=ab"}, "num=1", "default"),
        ({"model": "head_dim=8 all=ab"}, "all=ab", "default"),
    ],
)
def test_an_island_with_other_keys_is_refused_by_key(changes, here, there):
    """Texts of run.json are key=value words; a key that is absent has the default of base.yml."""
    stored = ELASTIC._replace(model="head_dim=8", data="default", tokens=7)
    own = stored._replace(tokens=9, **changes)
    with pytest.raises(ConfigError, match=f"^{here} .* {there} .*islands_store"):
        island_settings.adopted(own, stored, "s3://b/r", 4)
    assert island_settings.adopted(stored._replace(tokens=9), stored, "u", 4).tokens == 7


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (", weight: 1.5", ", weight: 0.5", "a:1,b:3"),
        (", weight: 3", ", weight: 1", "a:1,b:3"),
        (", weight: 1", ", weight: 3", "a:3,b:1"),
    ],
)
def test_the_shares_of_a_mixture_are_of_the_run(first, second, word):
    """Weights in the same proportion are the same."""
    mixture = f"[{{path: p, name: b{first}}}, {{path: q, name: a{second}}}]"
    mode = ["enable_islands=true", "island_name=a", "islands_store=s"]
    cfg = config.load([f"dataset_mixture={mixture}", *mode], {})
    words = island_settings.of(cfg, Facts("d", "t", 100, 4, 4, print)).run.data.split()
    assert f"dataset_mixture={word}" in words
