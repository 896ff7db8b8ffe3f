"""A user id without an entry in /etc/passwd, as containers run with: it trains, and root reads it.

`getpwuid` raises KeyError for it, which libraries for paths do not expect.
"""

import os
import pathlib
import pwd
import shutil
import subprocess
import sys
import tempfile

import jax
import pytest
from run import ROOT, output_of, train, train_arguments
from run_files import saved_steps

from maxdiloco import generate, hf
from maxdiloco.huggingface import folders
from maxdiloco.report import __main__ as report

USER = 54321  # beyond what distributions and containers give to users
MODEL = dict(vocab_size=257, head_dim=8, opt_type="sgd", use_qk_norm="false")

pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture
def nobody_has_a_name(monkeypatch):
    """No user id has an entry."""

    def absent(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", absent)
    monkeypatch.delenv("HOME", raising=False)
    with pytest.raises(KeyError):  # the positive control
        pathlib.Path("/").owner()
    with pytest.raises(RuntimeError):
        pathlib.Path("~").expanduser()


def owned(folder):
    """Give all of a folder to USER, where this process may."""
    if os.geteuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, USER, USER)


def test_every_program_works_on_a_run_of_a_user_without_a_name(
    tmp_path, evaluated, nobody_has_a_name
):
    (tmp_path / "text.txt").write_text("in the beginning there was a byte. " * 60)
    keys = MODEL | dict(dataset_type="text", dataset_path=tmp_path / "text.txt", eval_steps=1)
    assert train(tmp_path / "a", steps=2, **keys).code == 0
    folder = tmp_path / "a"
    owned(folder)
    assert saved_steps(folder) == [2]
    assert evaluated(folder)["step"] == 2
    assert output_of(generate.main, folder, "prompt=in", "max_new_tokens=1").startswith("in")
    page = tmp_path / "page.html"
    assert report.main([str(folder), f"out={page}"]) == 0 and page.stat().st_size
    assert hf.main(["export", str(folder), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "config.json").exists()
    assert train(tmp_path / "a", steps=3, **keys).code == 0
    assert saved_steps(folder) == [2, 3]


def test_a_home_that_nobody_has_is_a_plain_name(nobody_has_a_name):
    assert str(folders.folder_at("~/a", "like")) == "~/a"


@pytest.fixture
def open_folder():
    """A folder that any user can reach; pytest's are open to their owner only."""
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


@pytest.mark.full
def test_a_process_of_a_user_without_a_name_trains_and_resumes(open_folder):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become another user")
    python = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", sys.executable]
    environ = {"JAX_NUM_CPU_DEVICES": str(jax.device_count()), "PATH": os.environ["PATH"]}
    where = {"env": environ | {"PYTHONPATH": str(ROOT)}, "cwd": open_folder}
    if subprocess.run([*python, "-c", "import maxdiloco"], **where, check=False).returncode:
        pytest.skip(f"{sys.executable} is not open to other users")
    os.chown(open_folder, USER, USER)
    for steps in (2, 3):
        argv = ["-m", "maxdiloco.train", *train_arguments(open_folder / "a", steps=steps)]
        subprocess.run([*python, *argv], **where, check=True, timeout=300)
    assert saved_steps(open_folder / "a") == [2, 3]
    assert os.stat(open_folder / "a").st_uid == USER
