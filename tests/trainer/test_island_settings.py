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
        ({"islands_min": 2}, "islands_min=2 here, and 1 in the run of"),
        ({"eval_tokens": 48}, "eval_interval=12 here, and -1 in the run of"),
        ({"model": "head_dim=8 num=1 all=ab"}, "num=1 here, and default in the run of"),
        ({"model": "head_dim=8 all=ab"}, "all=ab here, and default in the run of .*. These are fi"),
    ],
)
def test_an_island_with_other_keys_is_refused_by_name(changes, words):
    """Texts of run.json are key=value words; what is not said is the default of base.yml."""
    stored = ELASTIC._replace(model="head_dim=8", data="default", tokens=7)
    own = stored._replace(tokens=9, **changes)
    with pytest.raises(ConfigError, match=f"^{words}.*[Ss]et .*, or use another islands_store"):
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
    mode = ["islands=elastic", "island=a", "islands_store=s"]
    cfg = config.load([f"dataset_mixture={mixture}", *mode], {})
    words = island_settings.of(cfg, Facts("d", "t", 100, 4, 4, print)).run.data.split()
    assert f"dataset_mixture={word}" in words
