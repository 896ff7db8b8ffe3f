"""Which keys the processes of a run must share, group by group, and how a difference is told."""

import pytest

from maxdiloco.flags import base_yml
from maxdiloco.flags.base_yml import MAY_DIFFER, PATHS_MAY_DIFFER
from maxdiloco.flags.shared_keys import MOST_SHOWN, difference, shared

KEYS = base_yml.declared()
DEFAULTS = {name: base_yml.as_lists(key.default) for name, key in KEYS.items()}

# Of each group of base.yml: a key that must be equal with another value, and one that may differ;
# a group without the second has none that may.
MATRIX = {
    "run": ({"data_shuffle_seed": 1}, {"base_output_directory": "/mnt/runs"}),
    "checkpoint": ({"checkpoint_period": 3}, None),
    "model": ({"base_emb_dim": 256}, {"model_name": "tiny"}),
    "numerics": ({"dtype": "float32"}, None),
    "mesh": ({"dcn_diloco_parallelism": 4}, None),
    "batch": ({"max_target_length": 512}, None),
    "inner": ({"learning_rate": 1e-3}, None),
    "diloco": ({"diloco_outer_lr": 0.1}, {"exchange_interface": "10.0.0.2"}),
    "data": ({"add_eos": False}, {"grain_worker_count": 4}),
    "tools": ({"peer_timeout_seconds": 5}, {"profiler": "xplane"}),
    "compile": ({"compiled_trainstep_file": "programs.zip"}, {"report": "report.json"}),
}


def same(changes, others=DEFAULTS):
    return shared(DEFAULTS | changes, keys=KEYS) == shared(DEFAULTS | others, keys=KEYS)


@pytest.mark.parametrize("group", MATRIX)
def test_of_each_group_one_key_must_be_equal_and_one_may_differ(group):
    """Processes that differ in H wait for ever, in a rate they train apart; paths are a host's."""
    unequal, own = MATRIX[group]
    names = [name for name, key in KEYS.items() if key.group.partition(":")[0] == group]
    assert {*unequal, *(own or {})} <= {*names}
    assert not same(unequal)
    if own:
        assert same(own)
    else:
        assert not any(KEYS[name].hosts for name in names)


def test_the_matrix_has_every_group():
    assert list(MATRIX) == list(dict.fromkeys(k.group.partition(":")[0] for k in KEYS.values()))


def test_what_base_yml_says_of_hosts_is_understood():
    """Other words would refuse the key, and nobody would see why."""
    said = [key.hosts for key in KEYS.values() if key.hosts]
    assert len(said) > 20
    assert all(text.startswith((MAY_DIFFER, PATHS_MAY_DIFFER)) for text in said)
    assert all(text.endswith(".") for text in said)


@pytest.mark.parametrize(
    "one, other, equal",
    [
        ({"dataset_path": "/data/a"}, {"dataset_path": "/mnt/b"}, True),
        ({"dataset_path": "/data/a"}, {}, False),
        ({"eval_sets": {"wiki": "/a"}}, {"eval_sets": {"wiki": "/b"}}, True),
        ({"eval_sets": {"wiki": "/a", "web": "/b"}},
         {"eval_sets": {"web": "/b", "wiki": "/a"}}, False),
        ({"dataset_mixture": [{"path": "a", "weight": 0.7}]},
         {"dataset_mixture": [{"path": "b", "weight": 0.7}]}, True),
        ({"dataset_mixture": [{"path": "a", "weight": 0.7}]},
         {"dataset_mixture": [{"path": "a", "weight": 0.3}]}, False),
        ({"dataset_mixture": [{"path": "a", "name": "web"}]},
         {"dataset_mixture": [{"path": "a", "name": "wiki"}]}, False),
    ],
)  # fmt: skip
def test_paths_may_differ_but_not_whether_there_is_one_nor_what_stands_beside_them(
    one, other, equal
):
    """A host that has no source at all would make other collective calls than the rest."""
    assert same(one, DEFAULTS | other) is equal


def test_a_difference_names_every_key_both_values_who_has_them_and_the_remedy():
    groups = {
        (0, 2): {"steps": 8, "sample_prompt": "", "new_key": 1, "seed": 0},
        (1,): {"steps": 9, "sample_prompt": "Once", "seed": 0},
        tuple(range(3, 20)): {"steps": 8, "sample_prompt": "", "new_key": 1, "seed": 0},
    }
    line = difference(groups)
    many = "processes 0, 2, 3, 4, 5, 6, 7, 8 and 11 more"
    assert line.startswith(
        f"steps is 8 in {many}, 9 in process 1; sample_prompt is \"\" in {many}, Once in process 1"
        f"; new_key is 1 in {many}, no such key in process 1. All processes of a run must"
    )
    assert "give each the same command, yml file and M_<KEY> variables" in line
    assert "seed" not in line


def test_of_a_long_value_the_part_that_differs_is_shown():
    one, other = ("rule, " * 40 + end for end in ("first" + "x" * 200, "second"))
    line = difference({(0,): {"rules": one}, (1,): {"rules": other}}).partition(". All ")[0]
    assert "first" in line and "second" in line
    assert len(line) < 2 * MOST_SHOWN + 60
