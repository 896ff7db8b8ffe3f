"""The start of a run: its vocabulary size, its learning rate on resume, refusals and its files."""

import re
import shutil
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tokenizers import Tokenizer, models, pre_tokenizers

from maxdiloco.checkpoint import parameter_sets
from maxdiloco.config import config, files
from maxdiloco.errors import CheckpointError, ConfigError
from maxdiloco.parallel.mesh import AXES
from maxdiloco.parallel.program import Program
from maxdiloco.run import run_files
from maxdiloco.run import settings as run_settings
from maxdiloco.run import state as run_state
from maxdiloco.run import tokenizer as run_tokenizer
from maxdiloco.run.state import rate_lines, refuse_changes
from maxdiloco.storage.run_folder import locate


@pytest.fixture
def own(tmp_path):
    """Makes argv of a tokenizer file of so many tokens, 0: none."""

    def make(tokens):
        if not tokens:
            return []
        vocabulary = {f"w{i}": i for i in range(tokens)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        argv = ["tokenizer_type=huggingface", f"tokenizer_path={tmp_path}"]
        return [*argv, "add_bos=false", "add_eos=false"]

    return make


AUTO, NAMED = "vocab_size=auto", "model_name=35m"
# Keys, tokens of one's own, tokens of the model, and rows of its embedding; auto: as many.
SIZES = [
    # Of the byte tokenizer 257 tokens; 3 * 128 = 384. The rows beyond are padding, masked.
    (AUTO, 0, (257, 384)),
    ("vocab_size=300", 0, (300, "auto")),
    (f"{AUTO} padded_vocab_size=260", 0, (257, 260)),
    # One's own rounded up to 128, also where vocab_size is left out, and of a named model without
    # override_model_config; everything else is the model's, which has 32,768 rows.
    (AUTO, 2, (2, 128)),
    (AUTO, 128, (128, "auto")),
    ("", 129, (129, 256)),
    (NAMED, 1000, (1000, 1024)),
    (f"{NAMED} {AUTO}", 1000, (1000, 1024)),
    # It keeps its rows where its tokenizer is used, 95 % of 32,768 being 31,129.6, or its weights,
    # unless another number is given; without a tokenizer file only auto may be.
    (NAMED, 31130, (32768, "auto")),
    (NAMED, 31129, (31129, 31232)),
    (NAMED, 32769, (32769, 32896)),
    (f"{NAMED} load_parameters_path=/runs/a", 1000, (32768, "auto")),
    (f"{NAMED} load_parameters_path=/runs/a vocab_size=1024", 1000, (1024, "auto")),
    (f"{NAMED} {AUTO}", 0, (257, 384)),
    ("model_name={}/mine.yml", 1000, (1000, 1024)),
]


@pytest.mark.parametrize("keys, tokens, expected", SIZES)
def test_a_model_has_the_tokens_and_rows_of_its_tokenizer(own, tmp_path, keys, tokens, expected):
    (tmp_path / "mine.yml").write_text("base_emb_dim: 64\n")
    argv = [*keys.format(tmp_path).split(), *own(tokens)]
    cfg = run_tokenizer.resolve_vocab_size(config.load(argv, {}))
    assert (cfg.vocab_size, cfg.padded_vocab_size) == expected
    assert NAMED not in argv or cfg.base_emb_dim == 512


@pytest.mark.parametrize(
    "keys, tokens, key",
    [
        (f"{AUTO} padded_vocab_size=256", 0, "padded_vocab_size"),
        (f"{NAMED} base_emb_dim=64", 1000, "base_emb_dim"),
        (f"{NAMED} vocab_size=1024", 0, "vocab_size"),
        # Checks that need the number are made again: no byte is left for a 258th fragment.
        (
            f"{AUTO} enable_streaming_diloco=true diloco_sync_period=1000 steps=1000 "
            "num_diloco_fragments=260 num_nonlayer_fragments=258",
            0,
            "num_nonlayer_fragments",
        ),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused_by_key(own, keys, tokens, key):
    with pytest.raises(ConfigError, match=f"^{key}="):
        run_tokenizer.resolve_vocab_size(config.load([*keys.split(), *own(tokens)], {}))


BEFORE = config.from_dict({"learning_rate": 1.0})


@pytest.mark.parametrize(
    ("before", "keys", "expected"),
    [
        # At step 4 of 4 the cosine has reached 0.05 of the peak. In 8 steps with none of warmup
        # (0.05 of 8 rounds to 0), step 5 is at 5/8: 0.05 + 0.475 (1 + cos(5 pi / 8)) = 0.343.
        (4, {}, ["step 5 .* 0.343, .* 0.05; learning_rate_schedule_steps=4 "]),
        (8, {"learning_rate": 0.1}, ["step 5 .* 0.0343, .* 0.343"]),
        (8, {}, []),
        (4, {"learning_rate_schedule_steps": 4}, []),
    ],
)  # fmt: skip
def test_a_changed_learning_rate_schedule_is_logged(before, keys, expected):
    cfg = config.from_dict({"learning_rate": 1.0} | keys)
    lines = rate_lines(cfg, BEFORE, before=before, t=4, total_steps=8)
    assert len(lines) == len(expected)
    assert all(re.search(pattern, line) for pattern, line in zip(expected, lines, strict=True))


def settings_of(cfg):
    return run_settings.read(cfg, Mesh(np.array(jax.devices()[:1]).reshape([1] * 6), AXES))


def test_a_state_that_does_not_fit_with_loaded_parameters_is_refused(monkeypatch):
    """A CPU refuses 2**60 bytes when the program runs, not when it is compiled."""
    state = Program("init", lambda x: jnp.full(2**58, x), on_compile=lambda *_: None)
    fingerprint = run_tokenizer.open_tokenizer(BEFORE).fingerprint
    found = np.float32(1), types.SimpleNamespace(meta={"tokenizer": fingerprint})
    monkeypatch.setattr(parameter_sets, "restore_parameters", lambda *_, **__: found)
    parts = types.SimpleNamespace(trainer=None, params=None, init=state)
    point = run_state.RestorePoint(0, None, "", None)
    with pytest.raises(ConfigError, match="init does not fit .*Out of memory"):
        run_state.restore(settings_of(BEFORE), parts, point, None)


def test_another_held_out_part_or_batch_is_refused_by_key():
    cfg, data = config.load([], {}), {"contents": "new", "tokenizer": "same"}

    def saved(of=cfg, **keys):
        meta = {"config": of.as_dict() | keys, "position": {"M": 2, "B": 2}, "contents": "old"}
        meta["tokenizer"] = "same"
        return types.SimpleNamespace(meta=meta, step=4, path="/runs/a/checkpoints/4")

    refuse_changes(settings_of(cfg), saved(), M=2, B=2, data=data | {"contents": "old"})
    same = data | {"contents": "old"}
    refuse_changes(settings_of(cfg), saved(), M=4, B=2, data=same)  # replicas may come
    plain = config.load(["enable_diloco=false"], {})
    refuse_changes(settings_of(plain), saved(plain), M=1, B=4, data=same)
    with pytest.raises(CheckpointError, match="^sequences_per_step=8 "):
        refuse_changes(settings_of(plain), saved(plain), M=4, B=2, data=same)
    keys = "^sequences_per_replica=8 .*per_device_batch_size .*load_full_state_path"
    with pytest.raises(CheckpointError, match=keys):
        refuse_changes(settings_of(cfg), saved(), M=2, B=8, data=same)
    island = config.load(["enable_islands=true", "islands_store=/a", "island_name=a"], {})
    with pytest.raises(CheckpointError, match="^sequences_per_replica=8 .*load_parameters_path"):
        refuse_changes(settings_of(island), saved(island), M=1, B=8, data=same)
    with pytest.raises(CheckpointError, match="^eval_fraction=0.05 "):
        refuse_changes(settings_of(cfg), saved(eval_fraction=0.1), M=2, B=2, data=data)


KEYS = [
    "run_name=a", "steps=7", "learning_rate=1e-5", "model_name=35m", "eval_interval=5",
    "sample_prompt=it's: \u00e4 \U0001f600",
    "mlp_activations=[gelu]", "override_model_config=true",
    "dataset_mixture=[{path: /a b, weight: 0.7, name: x}, {path: '/c, d', name: y}]",
    "eval_dataset_path={wiki: /data/wiki}", "logical_axis_rules=[[embed, [fsdp, tensor]]]",
]  # fmt: skip


@pytest.mark.parametrize("keys", [[], KEYS])
def test_the_config_file_gives_the_same_config(tmp_path, keys):
    cfg = config.load(keys, {})
    path = tmp_path / "config.yml"
    path.write_text(run_files.config_yml(cfg))
    assert config.load([str(path)], {}) == cfg
    assert max(map(len, path.read_text().splitlines())) <= 100 or keys


def test_a_file_that_cannot_be_written_is_a_note(tmp_path):
    said = []
    run_files.write(config.load([], {}), locate(tmp_path, "absent"), said.append)
    assert len(said) == 2
    assert said[0].startswith("note: ") and "config.yml" in said[0]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_packages_own_checkout(tmp_path):
    """Not that of another checkout around a virtual environment. With changes it is dirty."""

    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", tmp_path, *author, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    package = tmp_path / "maxdiloco"
    package.mkdir()
    shutil.copy(files.PACKAGE / "version.py", package)
    assert run_files.git_commit(package) is None
    git("init")
    git("commit", "--allow-empty", "-m", "another project")
    assert run_files.git_commit(package) is None
    git("add", "maxdiloco")
    git("commit", "-m", "the package")
    commit = run_files.git_commit(package)
    assert len(commit) == 40
    (package / "version.py").write_text("")
    assert run_files.git_commit(package) == f"{commit}-dirty"
