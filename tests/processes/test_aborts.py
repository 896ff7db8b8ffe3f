"""An abort in another thread leaves this process the time to end by itself."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, resource, sys, threading, time
from maxdiloco.processes import aborts
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if sys.argv[1] == "delayed":
    aborts.delay()
threading.Thread(target=ctypes.CDLL(None).abort).start()  # without the GIL, as in C++
time.sleep(1.0)
os._exit(5)
"""


@pytest.mark.parametrize("what, code", [("delayed", 5), ("at once", -signal.SIGABRT)])
def test_an_abort_waits_for_the_watch(what, code):
    """As the watch: it sees the lost peer, and ends the process after its patience of 1 s."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True)
    assert ended.returncode == code
