"""What may differ between a run and its resumption, and between the processes of a run."""

import pytest
from run import names_key

from maxdiloco.config.fields import Hosts, Resume
from maxdiloco.config.keys import KEYS
from maxdiloco.config.values import as_json
from maxdiloco.errors import CheckpointError
from maxdiloco.run import resume

BASE = {name: as_json(key.default) for name, key in KEYS.items()}


def refuse(saved=BASE, **changes):
    resume.refuse_changes(saved, BASE | changes, checkpoint="runs/a/checkpoints/5")


@pytest.mark.parametrize("name", KEYS)
def test_a_key_may_change_on_resume_only_if_its_tag_says_so(name):
    other = "another value"
    if KEYS[name].resume in (Resume.FIXED, Resume.SHAPES):
        with pytest.raises(CheckpointError, match=f"^{name}=another value "):
            refuse(**{name: other})
    else:
        refuse(**{name: other})


def test_replicas_rates_steps_and_exchanges_may_change():
    free = """num_diloco_replicas learning_rate diloco_outer_lr steps checkpoint_period dataset_path
        diloco_sync_period enable_streaming_diloco num_diloco_fragments num_nonlayer_fragments
        use_sequential_layers num_communication_overlapping_steps diloco_round_overlap
        diloco_aggregation
        communication_overlapping_alpha diloco_exchange_dtype diloco_error_feedback
        dataset_mixture"""
    assert refuse(**dict.fromkeys(free.split(), 12345)) is None


def test_keys_that_alter_the_result_are_refused_with_a_remedy():
    """load_parameters_path starts a new run from the weights, unless their shape differs."""
    refused = """diloco_outer_momentum diloco_outer_optimizer base_emb_dim data_shuffle_seed
        max_target_length enable_diloco dataset_per_replica"""
    for key in refused.split():
        with pytest.raises(CheckpointError) as error:
            refuse(**{key: 12345})
        line = str(error.value)
        assert line.startswith(f"{key}=12345 ") and str(BASE[key]) in line
        assert names_key(line, "run_name")
        assert names_key(line, "load_parameters_path") == (key != "base_emb_dim")
    with pytest.raises(CheckpointError, match="adam_b1=.*adam_b2=") as error:
        refuse(adam_b1=0.5, adam_b2=0.7)
    assert "\n" not in str(error.value)


def test_a_key_that_the_checkpoint_lacks_had_its_default():
    """A key that is gone counts as changed. A tuple equals the list that JSON makes of it."""
    saved = {key: value for key, value in BASE.items() if key != "adam_b1"}
    refuse(saved)
    with pytest.raises(CheckpointError, match="^adam_b1=0.5 "):
        refuse(saved, adam_b1=0.5)
    assert resume.differences({"old": 3}, {}) == {"old": (3, None, Resume.FIXED)}
    assert resume.differences({"a": [1, [2]]}, {"a": (1, (2,))}) == {}
    assert resume.differences({"a": [1, [2]]}, {"a": (1, (3,))}) != {}


def test_the_keys_that_shape_the_parameters_are_in_the_remedy():
    """A decoder's parameters follow from them, see models/model.py. adam_b1 differs, too, but
    shapes nothing."""
    shapes = """base_emb_dim base_num_decoder_layers base_mlp_dim base_num_query_heads
        base_num_kv_heads head_dim vocab_size padded_vocab_size mlp_activations logits_via_embedding
        use_qk_norm norm_placement attention_bias mlp_bias attention_sink latent_attention
        num_experts base_moe_mlp_dim shared_experts first_num_dense_layers router"""
    marked = {name for name, key in KEYS.items() if key.resume is Resume.SHAPES}
    assert marked == set(shapes.split())
    meta = {"config": BASE | {"base_emb_dim": 96, "head_dim": 24, "adam_b1": 0.5}}
    remedy = resume.model_remedy(BASE, meta)
    assert "base_emb_dim=96" in remedy and "head_dim=24" in remedy
    assert not names_key(remedy, "adam_b1")
    assert "=" not in resume.model_remedy(BASE, {"config": BASE})


def test_changed_keys_are_logged_with_both_values():
    new = BASE | dict(learning_rate=1e-4, log_period=5, run_name="b", mlp_activations=("gelu",))
    (line,) = (x.replace(resume.KEEP, " ") for x in resume.change_lines(BASE, new))
    assert "learning_rate 0.0004 -> 0.0001" in line
    assert "mlp_activations [silu, linear] -> [gelu]" in line
    assert "log_period 10 -> 5" in line and "run_name empty -> b" in line
    assert resume.change_lines(BASE, dict(BASE)) == []


# Of each group of base.yml: a key that must be equal with another value, and one that may differ;
# a group without the second has none that may.
MATRIX = {
    "run": ({"steps": 1}, {"base_output_directory": "/mnt/runs"}),
    "evaluation": ({"eval_steps": 3}, {"eval_dataset_path": ""}),
    "checkpoint": ({"checkpoint_period": 3}, None),
    "model": ({"base_emb_dim": 256}, {"model_name": "tiny"}),
    "numerics": ({"dtype": "float32"}, None),
    "mesh": ({"dcn_diloco_parallelism": 4}, None),
    "batch": ({"max_target_length": 512}, None),
    "inner": ({"learning_rate": 1e-3}, None),
    "diloco": ({"diloco_outer_lr": 0.1}, None),
    "islands": ({"islands_min_members": 2}, None),
    "data": ({"add_eos": False}, {"grain_worker_count": 4}),
    "network": ({"peer_timeout_seconds": 5}, {"exchange_interface": "10.0.0.2"}),
    "tools": ({"show_fragments": True}, {"profiler": "xplane"}),
    "compile": ({}, {"compile_topology": "v5e-16"}),
}


def same(changes, others=BASE):
    return resume.shared(BASE | changes) == resume.shared(BASE | others)


def test_of_each_group_one_key_must_be_equal_and_one_may_differ():
    """Processes with different periods wait for ever, with different rates they train two runs.
    Paths belong to a host."""
    groups = {}
    for name, key in KEYS.items():
        groups.setdefault(key.group, []).append(name)
    assert list(groups) == list(MATRIX)
    for group, (unequal, own) in MATRIX.items():
        assert {*unequal, *(own or {})} <= {*groups[group]}
        assert not unequal or not same(unequal), group
        assert (
            same(own)
            if own
            else not any(KEYS[name].hosts is not Hosts.SAME for name in groups[group])
        ), group


@pytest.mark.parametrize(
    "key, one, other, equal",
    [
        ("dataset_path", "/data/a", "/mnt/b", True),
        ("dataset_path", "/data/a", "", False),
        ("eval_dataset_path", {"wiki": "/a"}, {"wiki": "/b"}, True),
        ("eval_dataset_path", {"a": "/a", "b": ""}, {"b": "", "a": "/a"}, False),
        ("dataset_mixture", [{"path": "a", "weight": 1}], [{"path": "b", "weight": 1}], True),
        ("dataset_mixture", [{"path": "a", "weight": 1}], [{"path": "a", "weight": 2}], False),
        ("dataset_mixture", [{"path": "a", "name": "c"}], [{"path": "a", "name": "d"}], False),
    ],
)
def test_paths_of_hosts_may_differ_but_not_what_belongs_to_them(key, one, other, equal):
    """A host that has no source at all would make other collective calls than the rest."""
    assert same({key: one}, {key: other}) is equal


def test_a_difference_names_each_key_its_values_and_processes():
    groups = {
        (0, 2): {"steps": 8, "sample_prompt": "", "new_key": 1, "seed": 0},
        (1,): {"steps": 9, "sample_prompt": "Once", "seed": 0},
        tuple(range(3, 20)): {"steps": 8, "sample_prompt": "", "new_key": 1, "seed": 0},
    }
    line = resume.describe_processes(groups)
    many = "processes 0, 2, 3, 4, 5, 6, 7, 8 and 11 more"
    assert f"steps is 8 in {many}, 9 in process 1;" in line
    assert f"sample_prompt is empty in {many}, Once in process 1;" in line
    assert f"new_key is 1 in {many}, " in line
    assert "seed" not in line
    one, other = ("rule, " * 40 + end for end in ("first", "second"))
    line = resume.describe_processes({(0,): {"rules": one}, (1,): {"rules": other}})
    assert line.startswith("rules is ") and len(line.partition(". All ")[0]) < 3 * resume.MAX_SHOWN
