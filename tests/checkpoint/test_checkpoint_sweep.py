"""Every file operation of a save fails once: in Python, in Orbax and in the file layer below it."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

SWEEP = """
import ctypes, errno, json, os, pathlib, sys
import jax, numpy as np
from maxdiloco.checkpoint import seal
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.errors import SaveError
from maxdiloco.storage.run_folder import locate
sys.path.insert(0, "tests/checkpoint")
from test_checkpoint_faults import items, wanted, values

faults = ctypes.CDLL(os.environ["LD_PRELOAD"])
folder = locate(sys.argv[1], "run").checkpoints
below, never = str(folder).encode(), (1 << 31)

def arm(first, last, number):
    faults.faults_arm(below, ctypes.c_long(first), ctypes.c_long(last), number)

said = []
with Checkpointer(folder, max_to_keep=2, say=said.append) as checkpointer:
    for step in (1, 2, 3):  # the third removes the first
        arm(0, 0, 0)
        checkpointer.save(step, items(step), {}, last=True)
        checkpointer.wait()
    operations = faults.faults_count()
    found = []
    for n in range(1, operations + 1):
        step += 1
        said.clear()
        arm(n, n, errno.EIO)
        checkpointer.save(step, items(step), {}, last=True)
        checkpointer.wait()
        arm(0, 0, 0)
        restored = checkpointer.restore(wanted)
        checkpointer._known_good.clear()
        same = np.array_equal(restored.items["state"]["b"], values(step + 1))
        found.append([restored.step == step and same, list(said)])
    lasting = []
    for n in range(1, operations, operations // 5):
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            step += 1
            said.clear()
            newest = checkpointer.steps()[-1]
            arm(n, never, number)
            try:
                checkpointer.save(step, items(step), {}, last=True)
                error = ""
            except SaveError as failure:
                error = str(failure)
            checkpointer.wait()  # for the removal of old ones, which may fail too
            arm(0, 0, 0)
            good = checkpointer.restore(wanted).step
            checkpointer._known_good.clear()
            lasting.append([good in (newest, step), error, os.strerror(number), list(said)])
print(json.dumps([operations, found, lasting]))
"""


def test_whichever_file_operation_fails_the_state_is_saved_or_the_run_ends_in_one_line(tmp_path):
    """Each of the operations of a save fails once with EIO; and all from the n-th on.

    One that fails is made up for by the second try, so that the newest checkpoint is whole and
    holds the numbers of its step.
    """
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the library that lets operations fail")
    library = tmp_path / "file_faults.so"
    source = ROOT / "tests" / "file_faults.c"
    build = ["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(build, check=True)
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, str(tmp_path / "out")],
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr[-3000:]
    operations, found, lasting = json.loads(done.stdout)  # and nothing else is printed
    assert operations > 60
    for number, (whole, said) in enumerate(found, 1):
        assert whole, number
        assert len(said) <= 1, said
        assert all(line.startswith("warning: ") for line in said)
    failed = [said for _, said in found if said and "Input/output error" in said[0]]
    assert len(failed) > operations / 2, "the faults are seen at all"
    for whole, error, reason, said in lasting:
        assert whole
        assert error == "" or (reason in error and "\n" not in error)
        assert len(said) <= 2 and all(reason in line for line in said), said
    assert sum(error != "" for _, error, _, _ in lasting) > len(lasting) / 2
