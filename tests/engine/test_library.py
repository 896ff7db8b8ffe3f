"""What the library refuses and tells: trees, batches, defaults, states that are not finite."""

import inspect
import pathlib
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import maxdiloco
from maxdiloco import Checkpointer, DiLoCo, restore_state, save_state
from maxdiloco.diloco import outer_rate
from maxdiloco.errors import NumericsError
from maxdiloco.flags import config

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
BATCH = np.ones((2, 1), np.float32)


def inner_step(params, opt_state, batch):
    return {"w": params["w"] - 0.1 * batch.mean()}, opt_state, {"loss": batch.mean()}


def make(**options):
    return DiLoCo(inner_step, **(dict(num_replicas=2, sync_period=10) | options))


def broken(algorithm, *, memory="params"):
    """A state after one step in which replica 1, or theta, is not finite, and no flag says so."""
    state, _ = algorithm.step(algorithm.init({"w": jnp.ones((3, 2))}, ()), BATCH)
    whole = vars(state)[memory]
    bad = whole["w"].at[1, 0].set(np.nan)
    return replace(state, **{memory: {"w": bad}})


@pytest.mark.parametrize(
    ("params", "opt_state", "message"),
    [
        ({"a": 1.0}, (), r"params\['a'\] is no array but float. Give jnp.asarray"),
        ({"a": np.ones(2)}, {"n": 0}, r"opt_state\['n'\] is no array but int. Give"),
        ({}, (), "params has no leaves.* Give a tree of arrays"),
        ({"a": np.ones((0, 3))}, (), r"params\['a'\] has no elements, shape \(0, 3\). Leave"),
        ({"n": np.zeros(3, np.int32)}, (), r"params\['n'\] is int32.*Keep .* in opt_state"),
    ],
)
def test_a_tree_that_cannot_be_trained_is_one_line(params, opt_state, message):
    with pytest.raises(ValueError, match=message):
        make().init(params, opt_state)


@pytest.mark.parametrize(
    ("x", "words"), [(np.ones((1, 3)), "leading dim 1,"), (np.float32(1), "no dim,")]
)
def test_a_batch_without_the_replicas_dim_is_one_line(x, words):
    algorithm = make()
    with pytest.raises(ValueError, match=rf"batch\['x'\] has {words} num_replicas=2. Stack one"):
        algorithm.step(algorithm.init({"w": jnp.ones(3)}, ()), {"x": x})


@pytest.mark.parametrize("what", ["params", "outer"])
def test_a_state_that_is_not_finite_is_neither_handed_out_nor_saved(tmp_path, what):
    """Between two sends no flag knows of it; the good checkpoints stay."""
    algorithm = make()
    whose = r"params\['w'\] of replica 1" if what == "params" else r"theta\['w'\]"
    with Checkpointer(tmp_path, max_to_keep=1) as saver:
        good = algorithm.init({"w": jnp.ones((3, 2))}, ())
        save_state(saver, algorithm, good)
        bad = broken(algorithm, memory=what)
        for use in (
            algorithm.check_finite,
            algorithm.outer_params,
            lambda state: save_state(saver, algorithm, state),
        ):
            with pytest.raises(NumericsError, match=f"step 1: {whose} has a NaN .* checkpoint"):
                use(bad)
        saver.wait()
        assert saver.steps() == [0]
    make().close()  # before the first step there is nothing to tell
    if what == "params":  # a run that asks for nothing else does not end as if all were well
        algorithm = make()
        state, _ = algorithm.step(broken(algorithm), BATCH)
        with pytest.raises(NumericsError, match="step 2: .* replica 1"):
            algorithm.close()
        del state


def test_a_restore_says_which_numbers_of_the_rule_have_changed(tmp_path):
    """alpha, merge, rate and momentum, and what the exchange has changed."""
    first = make(alpha=0.5, outer_lr=0.7)
    state = first.init({"w": jnp.ones(3)}, ())
    said = []
    with Checkpointer(tmp_path, max_to_keep=1, say=said.append) as saver:
        save_state(saver, first, state)
        for options in (dict(alpha=0.5), dict(merge="rda", outer_lr=0.4, sync_period=5)):
            second = make(**options)
            second.bind({"w": jnp.ones(3)}, ())
            assert restore_state(saver, second).t == 0
    assert said == [
        "changed since the checkpoint: alpha 0.5 -> 0.0, merge mean -> rda, outer_lr 0.7 -> 0.4, "
        "sync_period 10 -> 5"
    ]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, []),
        ({"outer_overlap": "delayed"}, ["diloco_outer_overlap=delayed"]),
        ({"num_replicas": 4}, []),
        ({"num_replicas": 4, "merge": "rda"}, ["diloco_merge=rda"]),
    ],
)
def test_the_library_s_outer_rate_and_momentum_are_the_trainer_s(options, keys):
    algorithm = make(**options)
    algorithm.bind({"w": jnp.ones(3)}, ())
    rule = algorithm.note(algorithm.abstract_state)["rule"]
    cfg = config.with_replicas(config.load(keys, {}), options.get("num_replicas", 2))
    assert rule["outer_lr"] == cfg.diloco_outer_lr
    assert rule["outer_momentum"] == cfg.diloco_outer_momentum == outer_rate.MOMENTUM


def test_the_page_names_everything_public_and_every_argument():
    """Each name that maxdiloco exports, with every argument and default of the constructors."""
    for name in maxdiloco.__all__:
        assert f"maxdiloco.{name}" in PAGE, name
    for made in (DiLoCo, Checkpointer):
        for argument in list(inspect.signature(made).parameters)[1:]:
            assert f"`{argument}`" in PAGE, argument
    assert "`not_an_argument`" not in PAGE
