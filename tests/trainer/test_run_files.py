"""What a run's folder says of it: its config, and what it ran on."""

import shutil
import subprocess

import pytest

from maxdiloco.flags import base_yml, config
from maxdiloco.storage.run_folder import locate
from maxdiloco.trainer import run_files

KEYS = [
    "run_name=a", "steps=7", "learning_rate=1e-5", "model_name=35m", "eval_interval=5",
    "sample_prompt=it's: \u00e4 \U0001f600",
    "mlp_activations=[gelu]", "override_model_config=true",
    "dataset_mixture=[{path: /a b, weight: 0.7, name: x}, {path: '/c, d', name: y}]",
    "eval_sets={wiki: /data/wiki}", "logical_axis_rules=[[embed, [fsdp, tensor]]]",
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
    assert said[0].startswith("note: ") and "config.yml cannot be written (No such" in said[0]


def git(folder, *arguments):
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *author, *arguments], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_packages_own_checkout(tmp_path):
    """Not of a checkout in whose folder a virtual environment lies; with changes it is dirty."""
    package = tmp_path / "maxdiloco"
    package.mkdir()
    shutil.copy(base_yml.PACKAGE / "version.py", package)
    assert run_files.git_commit(package) is None
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "another project")
    assert run_files.git_commit(package) is None
    git(tmp_path, "add", "maxdiloco")
    git(tmp_path, "commit", "-m", "the package")
    commit = run_files.git_commit(package)
    assert len(commit) == 40
    (package / "version.py").write_text("")
    assert run_files.git_commit(package) == f"{commit}-dirty"
