"""The mixture of sources on the command line and in a file, and what is refused of it."""

import json

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, config, resume

TWO = "[{path: /a, weight: 0.7, name: web}, {path: /b, weight: 3, name: code}]"
PER_REPLICA = "dataset_per_replica=true"


def test_a_mixture_is_written_alike_on_the_command_line_in_json_and_in_a_file(tmp_path):
    """And survives the JSON of a checkpoint; a later layer wins."""
    expected = (
        {"path": "/a", "weight": "0.7", "name": "web"},
        {"path": "/b", "weight": "3", "name": "code"},
    )
    path = tmp_path / "run.yml"
    path.write_text(
        "dataset_mixture:\n  - path: /a\n    weight: 0.7\n    name: web\n"
        "  - {path: /b, weight: 3, name: code}\n"
    )
    for argv in (
        [f"dataset_mixture={TWO}"],
        [f"dataset_mixture={json.dumps(expected)}"],
        [str(path)],
    ):
        cfg = config.load(argv, {})
        assert tuple(map(dict, cfg.dataset_mixture)) == expected
        assert config.from_dict(json.loads(json.dumps(cfg.as_dict()))) == cfg
    one = "[{path: /c, name: other}]"
    cfg = config.load([str(path), f"dataset_mixture={one}"], {"M_DATASET_MIXTURE": TWO})
    assert tuple(map(dict, cfg.dataset_mixture)) == ({"path": "/c", "name": "other"},)
    assert f"dataset_mixture={one} (default [])" in config.describe_differences(cfg)


def test_weights_may_change_on_resume_and_replicas_sources_may_not():
    saved = config.load([f"dataset_mixture={TWO}"], {}).as_dict()
    new = config.load([f"dataset_mixture={TWO.replace('0.7', '5')}"], {}).as_dict()
    assert resume.changed_keys(saved, new, keys=base_yml.declared()) == {}
    changes = resume.changed_keys(saved, saved | {"dataset_per_replica": True}, keys={})
    assert list(changes) == ["dataset_per_replica"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["dataset_mixture=web"], "is not a list"),
        (["dataset_mixture=[web]"], "web is not a source. Write dataset_mixture=[{path"),
        (["dataset_mixture=[{path: /a}]"], "source {path: /a} has no name. Write"),
        (["dataset_mixture=[{name: a}]"], "has no path"),
        (["dataset_mixture=[{name: a, path: }]"], "has no path"),
        (["dataset_mixture=[{name: a, path: /a, wait: 1}]"], "has wait, which is no key of it"),
        (["dataset_mixture=[{name: a, path: /a, dataset_type: csv}]"], "csv of source a is none"),
        (["dataset_mixture=[{name: a/b, path: /a}]"], "name a/b cannot be part of a metric's name"),
        (["dataset_mixture=[{name: a, path: gs://b/c}]"], "Mount the bucket"),
        (["dataset_mixture=[{name: a, path: /a, weight: -1}]"], "weight -1 of source a is not a"),
        (["dataset_mixture=[{name: a, path: /a, weight: nan}]"], "Give its share, such as 0.7"),
        (["dataset_mixture=[{name: a, path: /a, weight: 0}]"], "no weight above 0. Give a source"),
        (["dataset_mixture=[{name: a, path: /a}, {name: a, path: /b}]"], "2 sources named a"),
        (["dataset_mixture=[{name: a, name: b, path: /a}]"], "name stands twice in one {table}"),
        (["dataset_mixture=[{name: [a], path: /a}]"], "is not a source"),
        (["dataset_mixture=[[{name: a, path: /a}]]"], "is not a source"),
        (["logical_axis_rules=[{embed: fsdp}]"], "{embed: fsdp} is not [logical axis"),
        (["mlp_activations=[{gelu: 1}]"], "must be one of"),
        ([f"dataset_mixture={TWO}", "dataset_path=/c"], "dataset_path=/c is given beside"),
        ([f"dataset_mixture={TWO}", "dataset_type=synthetic"], "Leave one of them out"),
        ([PER_REPLICA], "does nothing without dataset_mixture"),
        ([f"dataset_mixture={TWO}", PER_REPLICA], "do nothing with dataset_per_replica=true"),
    ],
)
def test_a_mixture_that_cannot_work_is_refused_in_one_line(flags, words):
    with pytest.raises(ConfigError) as raised:
        config.load(flags, {})
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
