"""A run folder that another person wrote names no code, secret or place of a host."""

import json
import os
import pathlib
import re
import shutil

import jax
import pytest
from etils import epath
from run import names_key, refused, train
from run_files import saved_steps

from maxdiloco import evaluate, generate, hf
from maxdiloco.checkpoint import seal
from maxdiloco.config import config
from maxdiloco.config.keys import KEYS
from maxdiloco.errors import ConfigError
from maxdiloco.planning import compile_run
from maxdiloco.report import __main__ as report
from maxdiloco.run import compile_cache

pytestmark = pytest.mark.usefixtures("programs")
STRANGER = 65534  # nobody


@pytest.fixture
def foreign(text_run, tmp_path, monkeypatch):
    """foreign(key=value): a copy of a run whose checkpoint has these values in its config."""
    monkeypatch.delenv("M_JAX_CACHE_DIR")
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)

    def foreign(**keys):
        folder = tmp_path / "text"
        if not folder.exists():
            shutil.copytree(text_run[0], folder)
        for step in saved_steps(folder):
            meta = folder / "checkpoints" / str(step) / "meta" / "metadata"
            stored = json.loads(meta.read_text())
            stored["meta"]["config"].update(keys)
            meta.write_text(json.dumps(stored))
            seal.write(epath.Path(meta.parents[1]))
        return folder

    yield foreign
    jax.config.update("jax_compilation_cache_dir", before)


def test_evaluate_opens_no_compile_cache_that_a_checkpoint_names(
    foreign, evaluated, tmp_path, monkeypatch
):
    folders = []
    setting = compile_cache.jax_setting

    def seen(name, value):
        if name == "jax_compilation_cache_dir":
            folders.append(value)
        return setting(name, value)

    monkeypatch.setattr(compile_cache, "jax_setting", seen)
    cache, own = tmp_path / "cache", tmp_path / "own"
    run = foreign(jax_cache_dir=str(cache))
    one_device = ["dcn_diloco_parallelism=1"]  # a CPU uses a cache there
    evaluated(run, *one_device)
    evaluated(run, *one_device, f"jax_cache_dir={own}")  # the positive control
    assert folders == [str(own)]  # of the second one only
    assert not cache.exists() and list(own.iterdir())


def test_a_checkpoint_gives_no_key_of_a_host():
    stored = config.load([], {}).as_dict()
    hostile = {"jax_cache_dir": "/evil", "exchange_secret_file": "/evil", "enable_islands": True,
               "base_output_directory": "/evil",
               "enable_wandb": True, "islands_store": "/evil", "islands_key": "/evil",
               "load_full_state_path": "/evil"}  # fmt: skip
    for found in (
        config.from_checkpoint(stored | hostile | {"learning_rate": 0.5}),
        config.with_changes(stored | hostile | {"learning_rate": 0.5}, [], {}, may_change=()),
    ):
        assert found.learning_rate == 0.5  # the positive control
        assert "/evil" not in json.dumps(found.as_dict()) and not found.enable_wandb
    argv, environ = ["jax_cache_dir=/mine"], {"M_PEER_PORT": "7"}
    may = ("jax_cache_dir", "peer_port")
    found = config.with_changes(stored | hostile, argv, environ, may_change=may)
    assert (found.jax_cache_dir, found.peer_port) == ("/mine", 7)


# Free text that names no code, place or secret, or that a checkpoint may give all the same.
NAMES = {"run_name", "sample_prompt", "text_column", "logical_axis_rules", "attention_pattern",
         "mlp_activations"}  # fmt: skip
READ = {"dataset_path", "dataset_mixture", "eval_dataset_path", "tokenizer_path", "model_name",
        "load_parameters_path"}  # fmt: skip


def test_every_key_of_free_text_says_whether_a_checkpoint_gives_it():
    texts = {name: key for name, key in KEYS.items() if type(key.default) in (str, tuple)}
    free = {name for name, key in texts.items() if not key.choices and key.default != "auto"}
    assert len(free) > 15
    assert {name for name in free if KEYS[name].from_checkpoint} <= NAMES | READ
    assert all(KEYS[name].from_checkpoint for name in READ)


def test_a_text_named_only_by_another_users_checkpoint_is_logged(
    foreign, evaluated, capfd, text_run
):
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file to another user")
    run, path = foreign(), text_run[1]["dataset_path"]
    words = rf"user {STRANGER}\b.*dataset_path={path}\b"
    capfd.readouterr()
    evaluated(run)
    assert not re.search(words, capfd.readouterr().out)  # the control: one's own run
    for file in run.rglob("*"):
        os.chown(file, STRANGER, STRANGER)
    evaluated(run)
    assert re.search(words, capfd.readouterr().out)


@pytest.mark.parametrize("breach", ["other owner", "others write", "group writes", "a file"])
def test_a_compile_cache_that_others_can_write_is_refused(tmp_path, monkeypatch, breach):
    cache = tmp_path / "cache"
    cache.touch() if breach == "a file" else cache.mkdir(mode=0o755)
    if breach == "other owner":
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        if os.stat(cache).st_uid == 0:
            os.chown(cache, 1, 1) if os.getuid() == 0 else pytest.skip("root's may be used")
    elif breach != "a file":
        os.chmod(cache, 0o757 if breach == "others write" else 0o775)
    keys = dict(steps=1, jax_cache_dir=cache)
    run = train(tmp_path / "a", **keys)
    assert run.code == 2 and names_key(run.error, "jax_cache_dir")
    assert not (tmp_path / "a").exists()


def test_plan_and_train_compile_refuse_such_a_compile_cache(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    assert compile_cache.own_cache(str(cache), "jax_cache_dir") == str(
        cache
    )  # the positive control
    os.chmod(cache, 0o777)
    with pytest.raises(ConfigError, match=f"jax_cache_dir={cache}"):
        compile_run.open_devices(config.load([f"jax_cache_dir={cache}"], {}))


def test_host_keys_in_a_yml_of_another_user_are_logged(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file to another user")
    path = tmp_path / "config.yml"
    path.write_text("jax_cache_dir: /evil\nlearning_rate: 0.5\npeer_port: auto\n")
    said = []
    assert config.load([str(path)], {}, warn=said.append).jax_cache_dir == "/evil"
    assert said == []  # one's own
    os.chown(path, STRANGER, STRANGER)
    config.load([str(path)], {}, warn=said.append)
    (line,) = said
    assert "jax_cache_dir=/evil" in line and f"user {STRANGER}" in line
    assert "learning_rate" not in line and "peer_port" not in line


WRONG = {
    "an activation that is a number": dict(mlp_activations=[10**9]),
    "activations that are a number": dict(mlp_activations=10**9),
    "a rule that is a number": dict(logical_axis_rules=[["embed", 1]]),
    "a width of a list": dict(base_emb_dim=[1]),
    "a width above int32": dict(base_emb_dim=10**10),
    "no accumulation": dict(gradient_accumulation_steps=0),
    "no batch": dict(per_device_batch_size=0),
    "a rate that is no number": dict(learning_rate=float("nan"), weight_decay=-1.0),
    "an unknown key": dict(colour="red"),
    "a router of text": dict(router={"num_groups": "x"}),
}


@pytest.mark.parametrize("keys", WRONG.values(), ids=WRONG)
def test_an_impossible_config_in_a_checkpoint_names_its_key(foreign, tmp_path, keys):
    run = foreign(**keys)
    for program, argv in (
        (evaluate, [run, "per_device_batch_size=2"]),
        (generate, [run]),
        (hf, ["export", run, tmp_path / "out"]),
    ):
        code, line = refused(program.main, *argv)
        assert code == 2 and any(names_key(line, key) for key in keys)


def test_a_number_of_5000_digits_in_config_yml_is_refused(foreign):
    run = foreign()
    path = pathlib.Path(run) / "config.yml"
    path.write_text(path.read_text().replace("steps: 4\n", f"steps: {'9' * 5000}\n", 1))
    code, line = refused(report.main, run)
    assert code == 2 and names_key(line, "steps") and len(line) < 400
