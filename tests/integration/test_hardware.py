"""Hardware that is not there ends a run in one line, before anything is trained on something else.

As real programs: here JAX has started its backends already.
"""

import os
import subprocess
import sys

import pytest
from process_tools import ROOT


@pytest.mark.parametrize("hardware", ["gpu", "tpu"])
def test_hardware_that_is_not_there_is_refused_with_2_and_the_remedy(tmp_path, hardware):
    """Without a plugin or a device JAX raises for a TPU, and takes the CPU in place of a GPU."""
    # Found before installed ones, which would ask for their devices.
    for name, text in [("libtpu", "raise ImportError('not here')"), ("jax_plugins", "")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "maxdiloco.train", f"hardware={hardware}", "dataset_type=synthetic"],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
        | {"M_BASE_OUTPUT_DIRECTORY": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"ConfigError: hardware={hardware} ")
    assert line.endswith(", or set hardware=cpu.")
    assert not (tmp_path / "runs").exists()
