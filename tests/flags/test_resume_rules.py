"""What may change between a run and its resumption."""

import pytest

from maxdiloco.errors import CheckpointError
from maxdiloco.flags import base_yml
from maxdiloco.flags.resume import (
    KEEP,
    change_lines,
    changed_keys,
    model_remedy,
    refuse_changes,
)

KEYS = base_yml.declared()
BASE = {name: base_yml.as_lists(key.default) for name, key in KEYS.items()}


def refuse(**changes):
    refuse_changes(BASE, BASE | changes, keys=KEYS, checkpoint="runs/a/checkpoints/5")


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_what_base_yml_says_of_resuming_is_understood(key):
    """Other words would refuse the key, and nobody would see why."""
    assert key.resume in ("", base_yml.SHAPES) or key.may_change
    assert key.resume == "" or key.resume.endswith(".")


def test_a_key_without_the_fact_is_refused_and_the_fact_alone_frees_it(tmp_path):
    """adam_b1 has no `Resume:` in base.yml; log_period has one."""
    text = (base_yml.config_folder() / "base.yml").read_text()
    path = tmp_path / "base.yml"
    fact = "# Resume: may change, because it only watches the run.\n"
    path.write_text(
        text.replace(f"{fact}log_period:", "log_period:").replace("adam_b1:", f"{fact}adam_b1:")
    )
    swapped = base_yml.declared(path)
    for key, with_fact, without in (("log_period", KEYS, swapped), ("adam_b1", swapped, KEYS)):
        refuse_changes(BASE, BASE | {key: 7}, keys=with_fact, checkpoint="")
        with pytest.raises(CheckpointError, match=f"^{key}=7 "):
            refuse_changes(BASE, BASE | {key: 7}, keys=without, checkpoint="")
    assert [name for name in KEYS if KEYS[name] != swapped[name]] == ["log_period", "adam_b1"]


@pytest.mark.parametrize(
    "key",
    ["num_diloco_replicas", "learning_rate", "diloco_outer_lr", "steps", "checkpoint_period",
     "diloco_sync_period", "enable_streaming_diloco", "num_diloco_fragments",
     "num_nonlayer_fragments", "use_sequential_layers", "num_communication_overlapping_steps",
     "communication_overlapping_alpha", "diloco_outer_overlap", "diloco_exchange_dtype",
     "diloco_error_feedback", "diloco_merge",
     "dataset_path"],
)  # fmt: skip
def test_replicas_learning_rates_steps_cadence_and_exchange_may_change(key):
    assert refuse(**{key: 12345}) is None


@pytest.mark.parametrize(
    "key",
    "diloco_outer_momentum diloco_outer_optimizer base_emb_dim data_shuffle_seed max_target_length "
    "enable_diloco".split(),
)
def test_a_key_that_alters_the_result_is_refused_with_both_values_and_the_way_out(key):
    old = BASE[key]
    with pytest.raises(CheckpointError) as error:
        refuse(**{key: 12345})
    assert str(error.value).startswith(f"{key}=12345 (the checkpoint has {old}): ")
    way_out = "Set it back, or set another run_name to start anew"
    weights = (
        ""
        if key == "base_emb_dim"
        else (", with load_parameters_path=runs/a/checkpoints/5 from its weights")
    )
    assert str(error.value).endswith(f"{way_out}{weights}.")


def test_all_changed_keys_are_named_in_one_line():
    with pytest.raises(CheckpointError, match=r"adam_b1=.*adam_b2=.*Set them back") as e:
        refuse(adam_b1=0.5, adam_b2=0.7)
    assert "\n" not in str(e.value)


def test_a_key_younger_than_the_checkpoint_had_its_default():
    saved = {key: value for key, value in BASE.items() if key != "adam_b1"}
    refuse_changes(saved, BASE, keys=KEYS, checkpoint="")
    with pytest.raises(CheckpointError, match=r"adam_b1=0.5 \(the checkpoint has 0.9\)"):
        refuse_changes(saved, BASE | {"adam_b1": 0.5}, keys=KEYS, checkpoint="")


def test_a_key_that_is_gone_counts_as_changed_and_a_tuple_equals_the_list_that_json_makes_of_it():
    assert changed_keys({"old": 3}, {}, keys={}) == {"old": (3, None)}
    assert changed_keys({"a": [1, [2]]}, {"a": (1, (2,))}, keys={}) == {}
    assert changed_keys({"a": [1, [2]]}, {"a": (1, (3,))}, keys={}) != {}


def test_the_batch_of_a_replica_is_compared_not_the_keys_it_comes_from():
    saved = BASE | {"sequences_per_replica": 8}
    # Twice the devices, half the sequences on each: the same 8.
    halved = {"per_device_batch_size": 2, "ici_fsdp_parallelism": 4, "sequences_per_replica": 8}
    refuse_changes(saved, BASE | halved, keys=KEYS, checkpoint="")
    with pytest.raises(
        CheckpointError, match=r"sequences_per_replica=16 .*has 8.*is per_device_batch_size \*"
    ):
        refuse_changes(saved, BASE | {"sequences_per_replica": 16}, keys=KEYS, checkpoint="")


def test_the_keys_that_shape_the_parameters_are_marked():
    """Those that a decoder's parameters follow from, see models/transformer.py."""
    shapes = {name for name, key in KEYS.items() if key.resume == base_yml.SHAPES}
    assert shapes == {
        *("base_emb_dim", "base_num_decoder_layers", "base_mlp_dim", "base_num_query_heads"),
        *("base_num_kv_heads", "head_dim", "vocab_size", "padded_vocab_size"),
        *("mlp_activations", "logits_via_embedding", "use_qk_norm", "qk_norm_scope"),
        *("norm_placement", "attention_bias", "mlp_bias", "attention_sink", "attention_type"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("num_experts", "base_moe_mlp_dim", "shared_experts", "first_num_dense_layers"),
        *("routed_bias", "router_bias"),
    }


def test_the_remedy_for_other_shapes_names_the_model_keys_that_differ():
    """adam_b1 differs too, but shapes nothing."""
    meta = {"config": BASE | {"base_emb_dim": 96, "head_dim": 24, "adam_b1": 0.5}}
    assert model_remedy(BASE, keys=KEYS)(meta) == "Set base_emb_dim=96, head_dim=24."
    assert "another program" in model_remedy(BASE, keys=KEYS)({"config": BASE})


def test_lines_name_every_key_that_differs_with_both_values_and_those_beside_the_training_apart():
    new = BASE | dict(learning_rate=1e-4, log_period=5, run_name="b", mlp_activations=("gelu",))
    lines = [line.replace(KEEP, " ") for line in change_lines(BASE, new, keys=KEYS)]
    assert lines == [
        'changed since the checkpoint: learning_rate 0.0004 -> 0.0001, mlp_activations ["silu", '
        '"linear"] -> ["gelu"]',
        "changed beside the training: log_period 10 -> 5, run_name empty -> b",
    ]
    assert change_lines(BASE, dict(BASE), keys=KEYS) == []
