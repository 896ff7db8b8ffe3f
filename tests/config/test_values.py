"""Values as people write them on the command line, in yml files and in the environment.

test_refused_keys.py has the values that the command line refuses.
"""

import json

import pytest
from run import names_key, train

from maxdiloco.config import config
from maxdiloco.config.keys import KEYS
from maxdiloco.config.values import show
from maxdiloco.errors import ConfigError

TWO = "[{path: /a, weight: 0.7, name: web}, {path: /b, weight: 3, name: code}]"
SOURCES = (
    {"name": "web", "path": "/a", "weight": "0.7"},
    {"name": "code", "path": "/b", "weight": "3"},
)


@pytest.mark.parametrize(
    "name, written, value",
    [
        *[("enable_diloco", text, True) for text in ("1", "yes", "on", "True")],
        *[("enable_diloco", text, False) for text in ("0", "no", "off", "False")],
        *[("learning_rate", text, 0.5) for text in ("0.5", ".5", "5e-1", "5E-1")],
        *[("learning_rate", text, 2.0) for text in ("2", "2.")],
        ("steps", "1e3", 1000),
        ("steps", "2.5e3", 2500),
        ("steps", "1_000", 1000),
        ("eval_interval", "-1.0", -1),
        ("per_device_batch_size", "12.0", 12),
        ("num_slices", "null", -1),
        ("run_name", "null", ""),
        ("run_name", "1e-4", "1e-4"),  # a text key stays text
        ("dataset_path", "/a=b/*.py", "/a=b/*.py"),  # only the first = separates
        ("mlp_activations", "[gelu]", ("gelu",)),
        ("logical_axis_rules", "[[embed, [fsdp]], [mlp, []]]", (("embed", ("fsdp",)), ("mlp", ()))),
        ("eval_dataset_path", "null", ""),
        ("eval_dataset_path", '{"wiki": "/w", "code": "/c"}', {"wiki": "/w", "code": "/c"}),
        ("eval_dataset_path", "\n  wiki: /w\n  code: /c", {"wiki": "/w", "code": "/c"}),
        ("dataset_mixture", TWO, SOURCES),
        ("dataset_mixture", json.dumps(SOURCES), SOURCES),
    ],
)
def test_values_are_read_as_people_write_them(tmp_path, name, written, value):
    """Other programs write yes, 1e3, 12.0, -key=value, --key=value and null (the default). yml 1.1
    by itself would read 1e-4 as text. Shown and stored values are read back as the same."""
    path = tmp_path / "run.yml"
    path.write_text(f"{name}: {written}\n")
    cfg = config.load([str(path)], {})
    assert vars(cfg)[name] == value and isinstance(vars(cfg)[name], type(value))
    assert config.from_dict(json.loads(json.dumps(cfg.as_dict()))) == cfg
    assert config.load([f"{name}={show(vars(cfg)[name])}"], {}) == cfg
    if "\n" not in written:
        assert config.load([f"{name}={written}"], {}) == cfg
        assert config.load([f"--{name}={written}"], {}) == cfg
        assert config.load([f"-{name}={written}"], {}) == cfg
        assert config.load([], {f"M_{name.upper()}": written}) == cfg


def test_the_last_value_of_a_repeated_key_counts(refusal):
    """So that a script may append to the arguments of another; a {table} may not repeat a key."""
    assert config.load(["steps=1", "log_period=2", "steps=3"], {"M_STEPS": "4"}).steps == 3
    assert names_key(refusal("eval_dataset_path={name: /a, name: /b}"), "name")


def test_all_unknown_keys_are_named_with_their_source(refusal, tmp_path):
    (tmp_path / "run.yml").write_text("qqq: 2\n")
    line = refusal(str(tmp_path / "run.yml"), "steps=5", "log_perod=3")
    for name in ("qqq", f"{tmp_path}/run.yml", "log_perod", "log_period"):
        assert names_key(line, name)
    line = refusal(environ={"M_QQQ": "1", "M_LEARNIN_RATE": "2"})
    for name in ("M_QQQ", "M_LEARNIN_RATE", "learning_rate"):
        assert names_key(line, name)
    assert names_key(refusal(environ={"M_STEPS": "x"}), "M_STEPS")


# The content of a yml file, and what the error names besides the file.
YML = [
    (b"steps: [1\n", ""),
    (b"a: b: c\n", ""),
    (b"\xff\xfe\xfa", ""),
    (b"\x00", ""),
    (b"- steps\n", ""),
    (b"steps: 1\nlog_period: 2\nsteps: 3\n", "steps"),
    (b"steps:\n  inner: 1\n", "steps"),
    (b"eval_dataset_path: [a]\n", "eval_dataset_path"),
    (b"eval_dataset_path: {a: b, a: c}\n", "a"),
    (b"steps: [1]\n", "steps"),
    (b"mlp_activations: silu\n", "mlp_activations"),
    (b"step: 5\n", "step"),
    (b"base_emb_dim: 64\nmodel_name: 1b\n", "base_emb_dim"),
]


@pytest.mark.parametrize("content, key", YML)
def test_a_wrong_yml_file_is_named(refusal, tmp_path, content, key):
    path = tmp_path / "run.yml"
    path.write_bytes(content)
    line = refusal(str(path))
    assert str(path) in line and (not key or names_key(line, key))


def test_an_unreadable_or_late_yml_file_is_named(refusal, tmp_path):
    (tmp_path / "folder.yml").mkdir()
    for argv in (["missing.yml"], [f"{tmp_path}/folder.yml"], ["steps=1", "run.yml"]):
        assert names_key(refusal(*argv), argv[-1])


@pytest.mark.parametrize(
    "name, value",
    [
        ("steps", "5"),
        ("steps", True),
        ("learning_rate", "1"),
        ("enable_diloco", 1),
        ("run_name", 5),
        ("mlp_activations", "silu"),
        ("stepz", 5),
    ],
)
def test_a_stored_value_of_another_type_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name}="):
        config.from_dict({name: value})


def test_every_whole_number_has_an_upper_limit(refusal):
    """JAX takes no more than int32 or int64, and some sizes are allocated at once."""
    whole = [name for name, key in KEYS.items() if type(key.default) is int]
    assert {"vocab_size", "learning_rate_schedule_steps", "dcn_diloco_parallelism"} <= set(whole)
    for name in whole:
        for number in (2**32, 2**63):
            assert refusal(f"{name}={number}").startswith(f"{name}={number} ")


@pytest.mark.parametrize("digits", [f"{-(2**63)}", "2147483648", "1" * 5000])
def test_a_number_of_any_length_is_refused_in_one_line(refusal, tmp_path, digits):
    """Python itself refuses to read more than 4,300 digits."""
    (tmp_path / "run.yml").write_text(f"base_mlp_dim: {digits}\n")
    for line in (
        refusal(f"base_mlp_dim={digits}"),
        refusal(environ={"M_BASE_MLP_DIM": digits}),
        refusal(str(tmp_path / "run.yml")),
    ):
        assert f"base_mlp_dim={digits[:100]}" in line and len(line) < 500


@pytest.mark.parametrize(
    "value", ["&a [*a]", "[*a]", "&a [silu]", "[" * 900 + "]" * 900, "[" * 12 + "]" * 12,
              "[" * 100_000, "[[*a,*a],&a x]"]
)  # fmt: skip
@pytest.mark.parametrize("name", ["mlp_activations", "logical_axis_rules"])
def test_a_nested_list_or_an_alias_is_refused(refusal, tmp_path, name, value):
    """Aliases and nested lists, of which few letters make a value of any size."""
    assert names_key(refusal(f"{name}={value}"), name)
    (tmp_path / "run.yml").write_text(f"steps: 5\n{name}: {value}\n")
    assert names_key(refusal(str(tmp_path / "run.yml")), "run.yml")


def test_control_characters_of_a_value_are_escaped_in_its_error():
    run = train("a", run_name="a\nb\x1b[2J")
    assert run.code == 2 and r"run_name=a\nb\x1b[2J" in run.error


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("steps", "all or an integer >= 1 and <= 2147483647"),
        ("mlp_activations_limit", "-1 or a number > 0"),
        ("diloco_outer_momentum", "auto or a number >= 0 and < 1"),
        ("hardware", "one of auto, cpu, gpu, tpu"),
        ("attention_pattern", "a list [...] of local, global"),
        ("head_dim", "an integer >= 2 and <= 2147483647 and a multiple of 2"),
    ],
)
def test_the_values_of_a_key_are_described(name, expected):
    assert KEYS[name].expected() == expected
