"""The host's memory; what its processor is good at is in tests/models/test_product.py."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from maxdiloco.parallel import job, processor

# Pages of a second block of 128 MiB, after one was freed, in a thread that is not the first. The
# heap of such a thread has 64 MiB at most: it would map a larger block whatever else is set.
FAULTS = """
import resource, threading
from maxdiloco.parallel import processor
{set_up}
def faults():
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        b"x" * 2**27
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=faults)
thread.start()
thread.join()
"""


def faults(set_up, **environ):
    code = FAULTS.format(set_up=set_up)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, env=os.environ | environ, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_new_pages():
    """128 MiB are 32768 pages. Controls: without the call, where the environment has its say."""
    assert faults("processor.keep_freed_memory()") < 4000
    assert faults("") >= 32768
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}
    assert faults("processor.keep_freed_memory()", **tunables) >= 32768


@pytest.mark.parametrize(("hardware", "expected"), [("cpu", 1), ("tpu", 0)])
def test_a_run_on_the_cpu_keeps_it(hardware, expected, monkeypatch):
    calls = []
    monkeypatch.setattr(processor, "keep_freed_memory", lambda: calls.append(1))
    for name in ("choose_platform", "emulate_devices", "visible_devices"):
        monkeypatch.setattr(job.mesh_lib, name, lambda cfg, **_: None)
    one = contextlib.nullcontext(SimpleNamespace(num_processes=1))
    monkeypatch.setattr(job.distributed, "processes", lambda *_, **__: one)
    cfg = SimpleNamespace(
        hardware=hardware,
        jax_cache_dir="",
        jax_distributed_initialization_timeout=1,
        peer_timeout_seconds=1,
        peer_port=0,
    )
    with job.joined(cfg):
        assert sum(calls) == expected
