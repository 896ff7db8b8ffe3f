"""Write the files that describe a run into its folder: config.yml and environment.json."""

import contextlib
import datetime
import importlib.metadata
import json
import pathlib
import platform
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from maxdiloco.cluster import coordination
from maxdiloco.config import files
from maxdiloco.config.keys import KEYS, Config
from maxdiloco.config.values import as_json
from maxdiloco.data.tokenizer import ByteTokenizer
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.metrics import line_files
from maxdiloco.run import tokenizer as run_tokenizer
from maxdiloco.storage.run_folder import RunFolder
from maxdiloco.version import __version__

# Packages that may change the numbers or the speed of a run, if they are installed.
_PACKAGES = (
    "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cudnn-cu12",
    "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13",
    "flax", "optax", "orbax-checkpoint", "tensorstore", "grain", "numpy", "ml_dtypes",
    "tokenizers", "sentencepiece", "datasets", "pyarrow", "tensorboardX", "wandb",
)  # fmt: skip
_HOSTS_S = 300.0  # generous: a process sends its name right after the barrier


def log_path(folder: RunFolder) -> epath.Path:
    """Return the path of this process's log; log.txt for process 0."""
    number = jax.process_index()
    return folder.path / (f"log_{number}.txt" if number else "log.txt")


def write(cfg: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
    """Write config.yml and environment.json, or log a failure. All processes call it."""
    hosts = host_names()
    if jax.process_index() != 0:
        return
    files = {
        "config.yml": config_yml(cfg),
        "environment.json": json.dumps(environment(hosts), indent=1) + "\n",
    }
    for name, content in files.items():
        path = folder.path / name
        with line_files.log_failure(path, say):
            path.write_bytes(content.encode(errors="surrogateescape"))  # paths may have them


def save_tokenizer(tokenizer: Tokenizer, folder: RunFolder, say: Callable[[str], None]) -> None:
    """Write the tokenizer's files into the run's folder on process 0, or log a failure."""
    path = folder.path / run_tokenizer.FOLDER
    consequence = ": only the checkpoints have the tokenizer"
    if jax.process_index() == 0 and not isinstance(tokenizer, ByteTokenizer):  # it has none
        with line_files.log_failure(path, say, consequence=consequence):
            tokenizer.save(path)


def config_yml(cfg: Config) -> str:
    """Return config.yml: every key with its value, by group. `train config.yml` resumes the run."""
    lines = [
        "# Every key of this run, with the value that its newest start received. The log has the",
        "# values that were chosen for auto and -1; some depend on the number of replicas. Resume",
        "# the run with `python -m maxdiloco.train config.yml`; if a path is relative, in the same",
        "# working directory.",
    ]
    group = ""
    for key in KEYS.values():
        if key.group != group:
            group = key.group
            lines += ["", f"# == {group}"]
        value = as_json(cfg.as_dict()[key.name])
        lines.append(f"{key.name}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def host_names() -> list[str]:
    """Return the host name of each process on process 0, and an empty list on the others."""
    key, here = "maxdiloco/host/{}".format, socket.gethostname()
    if number := jax.process_index():
        coordination.put(key(number), here)
        return []
    others = range(1, jax.process_count())
    what = "its host's name"
    return [here, *(coordination.value_of(p, key(p), what, timeout_s=_HOSTS_S) for p in others)]


def environment(hosts: list[str]) -> dict[str, Any]:
    """Return versions, hosts, devices, and the commit of a checkout, for environment.json."""
    installed = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "maxdiloco": __version__,
        "git_commit": git_commit(files.PACKAGE),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": installed,
        "processes": jax.process_count(),
        "hosts": hosts,
        "platform": jax.devices()[0].platform,
        "devices": dict(Counter(device.device_kind for device in jax.devices())),
    }


def git_commit(package: pathlib.Path) -> str | None:
    """Return the commit of a package's checkout, with `-dirty` if files have changed.

    None if the package is not in a checkout, or git is absent.
    """
    if _git(package, "ls-files", "--error-unmatch", "version.py") is None:
        return None  # installed inside the checkout of another project
    commit = _git(package, "rev-parse", "HEAD")
    clean = _git(package, "diff", "--quiet", "HEAD", "--", ".") is not None
    return commit and f"{commit}{'' if clean else '-dirty'}"


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
    """Return the output of git; None if it fails or is absent."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
