"""A run with several workers keeps the tests of a file together, and files that share a mark."""

import collections
import re
import subprocess
import sys

import grouping

FILE = """
import time
import pytest
{mark}
@pytest.mark.parametrize("i", range(4))
def test(i):
    time.sleep(0.02)
"""


def test_the_tests_of_a_file_and_files_with_a_mark_share_a_worker(tmp_path, pytestconfig):
    """Twelve files, of which the first two load libtpu; in a run with the same hook."""
    hooks = pytestconfig.hook.pytest_xdist_make_scheduler.get_hookimpls()
    assert grouping.pytest_xdist_make_scheduler in [hook.function for hook in hooks]
    (tmp_path / "conftest.py").write_text("from grouping import pytest_xdist_make_scheduler")
    for number in range(12):
        text = FILE.format(mark="@pytest.mark.tpu_aot" if number < 2 else "")
        (tmp_path / f"test_{number:02}.py").write_text(text)
    options = ["-v", "-n2", "--dist=loadscope", "-pno:cacheprovider", f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        env={"PYTHONPATH": grouping.__file__.rpartition("/")[0]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers = collections.defaultdict(set)
    for worker, file in re.findall(r"^\[(gw\d)\].* test_(\d+)\.py::", done.stdout, re.M):
        workers[file].add(worker)
    assert len(workers) == 12 and all(len(each) == 1 for each in workers.values())
    assert workers["00"] == workers["01"]
    assert set().union(*workers.values()) == {"gw0", "gw1"}
