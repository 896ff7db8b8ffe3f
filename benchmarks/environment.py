"""Virtual environments for the peers that a benchmark compares with."""

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

from maxdiloco.errors import ConfigError


def environment(out: pathlib.Path, requirements: Sequence[str]) -> pathlib.Path:
    """Make a virtual environment in `out/venv`, unless it exists with these requirements.

    pip's own settings apply, such as PIP_EXTRA_INDEX_URL.

    Returns:
      The path of its python.

    Raises:
      ConfigError: pip or venv failed; the last line of their log is in the message.
    """
    folder, log = out / "venv", out / "pip.log"
    python, ready = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(requirements)
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {', '.join(requirements)} in {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    install = [str(python), "-m", "pip", "install", "--no-input", *requirements]
    with log.open("w", encoding="utf-8") as file:
        for command in ([sys.executable, "-m", "venv", str(folder)], install):
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
            if done.returncode:
                last = log.read_text(encoding="utf-8").strip().rpartition("\n")[2]
                raise ConfigError(
                    f"out={out}: the environment cannot be made there: {last} ({log}). It "
                    f"needs a package index that pip reaches and a Python that has these packages."
                )
    ready.write_text(wanted, encoding="utf-8")
    return python
