"""scripts/island_example.py: two programs over a folder, one of them killed and started again."""

import re
import sys
import time

import pytest
from run import ROOT, Process, assert_exit_codes

from maxdiloco.islands import __main__ as islands
from maxdiloco.islands import audit, log_store

pytestmark = [pytest.mark.usefixtures("programs")]
TOKENS = 1_000_000


def test_the_island_example_survives_a_kill_and_ends_with_equal_parameters(tmp_path):
    """Both print the same sum of the outer parameters, and every record can be replayed."""
    store, script = str(tmp_path / "store"), str(ROOT / "scripts" / "island_example.py")
    environ = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    def start(name):
        return Process([sys.executable, script, store, name, str(TOKENS)], environ)

    with start("a") as a, start("b") as killed:
        killed.wait_for_output("step 200")
        deadline = time.monotonic() + 120
        while "b" not in members(log_of(store)):
            assert time.monotonic() < deadline and killed.popen.poll() is None
            time.sleep(0.1)
        killed.popen.kill()
        with start("b") as b:
            assert_exit_codes([a, b, killed], 0, 0, -9)
            assert "island b has joined as incarnation 2" in b.output
            ends = [re.search(r"parameters\| (\S+)", one.output)[1] for one in (a, b)]
    assert ends[0] == ends[1] and float(ends[0]) > 0
    assert islands.main(["audit", store]) == 0
    log = log_of(store)
    assert log.state.tokens >= TOKENS
    assert members(log) == {"a", "b"}


def log_of(store):
    bucket = log_store.open_bucket(store)
    return audit.replay(bucket, audit.read_run(bucket), 0)


def members(log):
    return {member.island for record in log.records for member in record.members}
