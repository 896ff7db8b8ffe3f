"""What may change between a run and its resumption."""

import pathlib

import pytest
import yaml

from maxdiloco.errors import CheckpointError
from maxdiloco.flags.resume import (
    FREE_KEYS,
    MODEL_KEYS,
    changed_keys,
    model_remedy,
    refuse_changes,
)

BASE = yaml.safe_load((pathlib.Path(__file__).parents[2] / "configs/base.yml").read_text())


def refuse(**changes):
    refuse_changes(BASE, BASE | changes, defaults=BASE)


def test_the_same_config_is_accepted():
    assert changed_keys(BASE, dict(BASE), defaults=BASE) == {}
    assert refuse() is None


def test_every_free_key_is_a_key():
    """A misspelt or renamed key in the table would be refused to users."""
    assert set(FREE_KEYS) - set(BASE) == set()


@pytest.mark.parametrize(
    "key",
    ["num_diloco_replicas", "learning_rate", "diloco_outer_lr", "steps", "checkpoint_period"],
)
def test_replicas_learning_rates_steps_and_cadence_may_change(key):
    assert refuse(**{key: 12345}) is None


@pytest.mark.parametrize(
    "key",
    [
        "diloco_sync_period",
        "num_diloco_fragments",
        "num_communication_overlapping_steps",
        "communication_overlapping_alpha",
        "diloco_exchange_dtype",
        "diloco_outer_momentum",
        "base_emb_dim",
        "adam_b2",
        "dataset_path",
        "data_shuffle_seed",
        "max_target_length",
        "enable_diloco",
    ],
)
def test_a_key_that_alters_the_result_is_refused_with_both_values_and_the_way_out(key):
    old = BASE[key]
    with pytest.raises(CheckpointError) as error:
        refuse(**{key: 12345})
    assert str(error.value).startswith(f"{key}=12345 (the checkpoint has {old}): ")
    assert "Set it back, or set another run_name" in str(error.value)


def test_all_changed_keys_are_named_in_one_line():
    with pytest.raises(CheckpointError, match=r"adam_b1=.*diloco_sync_period=.*Set them back") as e:
        refuse(adam_b1=0.5, diloco_sync_period=7)
    assert "\n" not in str(e.value)


def test_a_key_younger_than_the_checkpoint_had_its_default():
    saved = {key: value for key, value in BASE.items() if key != "adam_b1"}
    refuse_changes(saved, BASE, defaults=BASE)
    with pytest.raises(CheckpointError, match=r"adam_b1=0.5 \(the checkpoint has 0.9\)"):
        refuse_changes(saved, BASE | {"adam_b1": 0.5}, defaults=BASE)


def test_a_key_that_is_gone_counts_as_changed():
    assert changed_keys({"old": 3}, {}, defaults={}) == {"old": (3, None)}


def test_tuples_equal_the_lists_that_json_makes_of_them():
    assert changed_keys({"a": [1, [2]]}, {"a": (1, (2,))}, defaults={}) == {}
    assert changed_keys({"a": [1, [2]]}, {"a": (1, (3,))}, defaults={}) != {}


def test_the_batch_of_a_replica_is_compared_not_the_keys_it_comes_from():
    saved = BASE | {"sequences_per_replica": 8}
    # Twice the devices, half the sequences on each: the same 8.
    halved = {"per_device_batch_size": 2, "ici_fsdp_parallelism": 4, "sequences_per_replica": 8}
    refuse_changes(saved, BASE | halved, defaults=BASE)
    with pytest.raises(
        CheckpointError, match=r"sequences_per_replica=16 .*has 8.*is per_device_batch_size \*"
    ):
        refuse_changes(saved, BASE | {"sequences_per_replica": 16}, defaults=BASE)


def test_every_model_key_is_a_key_and_no_free_one():
    assert set(MODEL_KEYS) <= set(BASE) - set(FREE_KEYS)


def test_the_remedy_for_other_shapes_names_the_model_keys_that_differ():
    """adam_b1 differs too, but shapes nothing."""
    meta = {"config": BASE | {"base_emb_dim": 96, "head_dim": 24, "adam_b1": 0.5}}
    assert model_remedy(BASE)(meta) == "Set base_emb_dim=96, head_dim=24."


def test_the_remedy_when_no_model_key_differs():
    assert "another program" in model_remedy(BASE)({"config": BASE})
