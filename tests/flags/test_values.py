"""Values as people write them, wherever they are written, and what is said of those that are none.
The table of what is refused on the command line is in test_config_errors.py."""

import json
import types

import pytest

from maxdiloco import train
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, checks, config

TWO = "[{path: /a, weight: 0.7, name: web}, {path: /b, weight: 3, name: code}]"
SOURCES = (
    (("path", "/a"), ("weight", "0.7"), ("name", "web")),
    (("path", "/b"), ("weight", "3"), ("name", "code")),
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
        ("steps", "-1.0", -1),
        ("per_device_batch_size", "12.0", 12),
        ("num_diloco_fragments", "null", 1),
        ("num_slices", "null", -1),
        ("run_name", "null", ""),
        ("run_name", "1e-4", "1e-4"),  # a text key stays text
        ("dataset_path", "/a=b/*.py", "/a=b/*.py"),  # only the first = separates
        ("mlp_activations", "[gelu]", ("gelu",)),
        ("logical_axis_rules", "[[embed, [fsdp]], [mlp, []]]", (("embed", ("fsdp",)), ("mlp", ()))),
        ("eval_dataset_path", "null", ""),
        ("eval_dataset_path", '{"wiki": "/w", "code": "/c"}', (("wiki", "/w"), ("code", "/c"))),
        ("eval_dataset_path", "\n  wiki: /w\n  code: /c", (("wiki", "/w"), ("code", "/c"))),
        ("dataset_mixture", TWO, SOURCES),
        ("dataset_mixture", json.dumps([dict(source) for source in SOURCES]), SOURCES),
    ],
)
def test_values_are_taken_as_people_write_them_wherever_they_are_written(
    tmp_path, name, written, value
):
    """Other programs write yes, 1e3, 12.0, --key=value and null; null is no choice of one's own.
    yml 1.1 alone would read 1e-4 as text. What is shown and what a checkpoint stores is the same.
    """
    path = tmp_path / "run.yml"
    path.write_text(f"{name}: {written}\n")
    cfg = config.load([str(path)], {})
    assert vars(cfg)[name] == value and isinstance(vars(cfg)[name], type(value))
    assert config.from_dict(json.loads(json.dumps(cfg.as_dict()))) == cfg
    assert config.load([f"{name}={base_yml.show(vars(cfg)[name])}"], {}) == cfg
    if "\n" not in written:
        assert config.load([f"{name}={written}"], {}) == cfg
        assert config.load([f"--{name}={written}"], {}) == cfg
        assert config.load([], {f"M_{name.upper()}": written}) == cfg


def test_of_a_key_that_is_given_twice_the_last_one_counts_with_a_warning(refusal):
    """So that a script may append to the flags of another; not so within a {table}."""
    told = []
    assert config.load(["steps=1", "log_period=2", "steps=3"], {}, warn=told.append).steps == 3
    assert told == [
        "warning: steps=3 comes after steps=1 on the command line, and the last one counts."
    ]
    config.load(["steps=1", "log_period=2"], {"M_STEPS": "4"}, warn=told.append)
    assert len(told) == 1
    given = "eval_dataset_path={name: /a, name: /b}"
    assert refusal(given) == f"{given}: name stands twice in one {{table}}. Keep one of them."


def test_all_unknown_keys_are_named_at_once_and_where_they_stand(refusal, tmp_path):
    (tmp_path / "run.yml").write_text("qqq: 2\n")
    assert refusal(str(tmp_path / "run.yml"), "steps=5", "log_perod=3") == (
        f"qqq=2 ({tmp_path}/run.yml) is no key. log_perod=3 (command line) is no key. Did you mean "
        "log_period? --help lists every key."
    )
    for name in ("M_LEARNIN_RATE", "M_learning_rate"):
        assert f"{name}=1 is no key. Did you mean M_LEARNING_RATE?" in refusal(environ={name: "1"})
    line = refusal(environ={"M_QQQ": "1", "M_STEPZ": "2"})
    assert "M_QQQ=1 is no key. Unset it." in line and "mean M_STEPS?" in line
    assert "steps=x (environment M_STEPS) is not a whole" in refusal(environ={"M_STEPS": "x"})


@pytest.mark.parametrize(
    "content, words",
    [
        (b"steps: [1\n", ["is not a yml file: line ", "Write one `key: value` a line"]),
        (b"a: b: c\n", ["is not a yml file: line 1: ", "Write one"]),
        (b"\xff\xfe\xfa", ["is not a yml file: it is not text", "Write one"]),
        (b"\x00", ["is not a yml file: it is not text", "Write one"]),
        (b"- steps\n", ["holds no keys", "Write one"]),
        (b"steps: 1\nlog_period: 2\nsteps: 3\n", ["steps twice, in lines 1 and 3", "Keep one"]),
        (b"steps:\n  inner: 1\n", ["steps={inner: 1}", "is a table", "keys are not nested"]),
        (b"eval_dataset_path: [a]\n", ["eval_dataset_path=[a]", "is a list"]),
        (b"eval_dataset_path: {a: b, a: c}\n", ["a stands twice in one {table}", "Keep one"]),
        (b"steps: [1]\n", ["steps=[1]", "run.yml) is a list", "steps=1000"]),
        (b"mlp_activations: silu\n", ["mlp_activations=silu", "is not a list"]),
        (b"step: 5\n", ["step=5", "run.yml) is no key", "Did you mean steps?"]),
        (b"base_emb_dim: 64\nmodel_name: 1b\n", ["base_emb_dim=64", "override_model_config=true"]),
    ],
)
def test_a_yml_file_that_does_not_work_is_named(refusal, tmp_path, content, words):
    path = tmp_path / "run.yml"
    path.write_bytes(content)
    line = refusal(str(path))
    assert str(path) in line
    assert [word for word in words if word not in line] == []


def test_a_yml_file_that_cannot_be_read_or_comes_late_is_named(refusal, tmp_path):
    line = refusal(f"{tmp_path}/missing.yml")
    assert "missing.yml cannot be read: No such file" in line
    assert "Give the path of a yml file" in line
    (tmp_path / "folder.yml").mkdir()
    assert "folder.yml cannot be read: Is a directory" in refusal(f"{tmp_path}/folder.yml")
    line = refusal("steps=1", "run.yml")
    assert "run.yml is not key=value" in line and "a yml file comes first" in line


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("steps", "5", "=5 (stored config) is not of type int"),
        ("steps", True, "=true (stored config) is not of type int"),
        ("learning_rate", "1", "=1 (stored config) is not of type float"),
        ("enable_diloco", 1, "=1 (stored config) is not of type bool"),
        ("run_name", 5, "=5 (stored config) is not of type text"),
        ("mlp_activations", "silu", "=silu (stored config) is not of type list"),
        ("stepz", 5, "=5 (stored config) is no key. Did you mean steps?"),
    ],
)
def test_a_stored_config_of_another_kind_is_refused(name, value, words):
    with pytest.raises(ConfigError) as caught:
        config.from_dict({name: value})
    assert str(caught.value).startswith(name + words)


def test_every_whole_number_has_an_upper_limit():
    """JAX takes no more than int32 or int64, and some sizes are allocated at once."""
    keys = base_yml.declared()
    whole = [name for name, key in keys.items() if type(key.default) is int]
    assert {"vocab_size", "learning_rate_schedule_steps", "dcn_diloco_parallelism"} <= set(whole)
    for name in whole:
        for number in (2**32, 2**63):
            cfg = types.SimpleNamespace(**{n: key.default for n, key in keys.items()})
            vars(cfg)[name] = number
            with pytest.raises(ConfigError, match=f"{name}={number} (is too large|must be)"):
                checks.check(cfg, keys)


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
        assert "is too large" in line or "must be >= 1" in line


@pytest.mark.parametrize(
    "value", ["&a [*a]", "[*a]", "&a [silu]", "[" * 900 + "]" * 900, "[" * 12 + "]" * 12,
              "[" * 100_000, "[[*a,*a],&a x]"]
)  # fmt: skip
@pytest.mark.parametrize("name", ["mlp_activations", "logical_axis_rules"])
def test_a_list_without_an_end_is_refused(refusal, tmp_path, name, value):
    """Aliases and nested lists, of which few letters make a value of any size."""
    assert "is not a list" in refusal(f"{name}={value}")
    (tmp_path / "run.yml").write_text(f"steps: 5\n{name}: {value}\n")
    assert "run.yml is not a yml file: line " in refusal(str(tmp_path / "run.yml"))


def test_a_value_with_a_line_feed_makes_a_message_of_one_line(capsys):
    assert train.main(["run_name=a\nb\x1b[2J"]) == 2
    assert capsys.readouterr().err == (
        r"ConfigError: run_name=a\nb\x1b[2J cannot name a folder. Use letters, digits, '.', '_' "
        "and '-'; base_output_directory says where the folder is.\n"
    )
