"""What islands of a run have in common, and the argument or key that an error names."""

import pytest
import tiny_problem
from test_island_trainer import an_island, first_values

from maxdiloco.config import config
from maxdiloco.errors import ConfigError
from maxdiloco.run import island as run_island
from maxdiloco.run.island import RunProperties

ISLAND = ["enable_islands=true", "island_name=a", "islands_store=s"]


def opened(store, name, **options):
    """An island that has opened its store."""
    island = an_island(store, name, **options)
    island.bind(*first_values(tiny_problem.problem("layers")))
    island.open()
    return island


@pytest.mark.parametrize(
    ("changes", "here", "there"),
    [
        ({"exchange_dtype": "int8"}, "exchange_dtype=int8", "float32"),
        ({"sync_period": 5}, "sync_period=5", "4"),
        ({"same": {"data": "v2"}}, "data=v2", "v1"),
        ({"same": {"data": "v1", "more": 1}}, "more=1", "None"),
        ({"min_members": 2}, "members=2", "1"),
        ({"eval_tokens": 48}, "eval_tokens=48", "0"),
        ({"global_batch_size": 2}, "global_batch_size=2", "null"),
    ],
)
def test_an_island_with_other_settings_is_refused_by_name(changes, here, there, tmp_path):
    names = {"min_members": "members"}
    same = dict(same={"data": "v1"}, option_names=names)
    first = an_island(tmp_path / "store", "a", **same)
    first.join(*first_values(tiny_problem.problem("layers")))
    first.leave()
    with pytest.raises(ConfigError, match=f"^{here} .* {there} "):
        opened(tmp_path / "store", "b", **same | changes)
    other = opened(tmp_path / "store", "c", **same | dict(total_tokens=7, block_tokens=8))
    assert (other.run.tokens, other.run.block_tokens) == (10**6, 64)
    with pytest.raises(ConfigError, match="step_tokens"):
        opened(tmp_path / "store", "d", **same | dict(step_tokens=65))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"name": "a/b"}, "name="),
        ({"outer_optimizer": "adam"}, "outer_optimizer="),
        ({"round_overlap": "eager"}, "round_overlap="),
        ({"collective": "reduce_scatter"}, "collective="),
        ({"exchange_dtype": "int9"}, "exchange_dtype="),
        ({"global_batch_size": 3}, "global_batch_size="),  # a step has 4 tokens
        ({"global_batch_size": 0}, "global_batch_size="),
    ],
)
def test_an_argument_that_islands_do_not_have_is_refused(options, named, tmp_path):
    name = options.pop("name", "a")
    with pytest.raises(ValueError, match=f"^{named}"):
        an_island(tmp_path, name, **options)


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
    cfg = config.load([f"dataset_mixture={mixture}", *ISLAND], {})
    same = run_island.same_settings(cfg, RunProperties("d", "t", 100, 4, 4, print))
    assert same["dataset_mixture"] == word and same["tokenizer_path"] == "t"


def test_a_long_value_is_hashed_and_a_key_is_one_pair():
    sizes = config.load([*ISLAND, "override_model_config=true", "base_emb_dim=64"], {})
    same = run_island.same_settings(sizes, None)
    assert same["base_emb_dim"] == "64" and same["num_diloco_fragments"]
    assert max(map(len, same.values())) <= 200
