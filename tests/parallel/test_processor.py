"""The host's memory; what its processor is good at is in tests/models/test_product.py."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from maxdiloco.config import config
from maxdiloco.parallel import processor
from maxdiloco.run import startup

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
{run}
"""
FIRST, ANOTHER = "faults()", "thread.start(); thread.join()"
ONE_HEAP = "processor.keep_freed_memory(in_caller=False)"
HEAP_OF_EACH = "processor.keep_freed_memory(in_caller=True)"
glibc = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")


def pages(code, **environ):
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, env=os.environ | environ, check=True)
    return int(done.stdout)


@glibc
@pytest.mark.parametrize(
    ("set_up", "run", "environ", "kept"),
    [
        (ONE_HEAP, ANOTHER, {}, True),
        ("", ANOTHER, {}, False),
        (ONE_HEAP, ANOTHER, {"GLIBC_TUNABLES": "glibc.malloc.check=0"}, False),  # it has its say
        # Threads that compile have heaps of their own where programs run in the caller.
        (HEAP_OF_EACH, ANOTHER, {}, False),
        (HEAP_OF_EACH, FIRST, {}, True),
    ],
)
def test_freed_memory_is_used_again_without_new_pages(set_up, run, environ, kept):
    """128 MiB are 32768 pages."""
    found = pages(FAULTS.format(set_up=set_up, run=run), **environ)
    assert found < 4000 if kept else found >= 32768


# Bytes by which the first thread's heap ends earlier after a block of it is freed.
GIVEN_BACK = """
import ctypes
from maxdiloco.parallel import processor
processor.keep_freed_memory(in_caller=True)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.sbrk.restype = [ctypes.c_void_p], ctypes.c_void_p
block = libc.malloc({size})
end = libc.sbrk(0)
assert block and block + {size} <= end
libc.free(block)
print(end - libc.sbrk(0))
"""


@glibc
def test_a_block_of_any_size_is_kept():
    """3 GiB, of which no page is touched: mallopt takes an int, so 2 GiB would be a threshold."""
    assert pages(GIVEN_BACK.format(size=3 << 30)) == 0


# Least pages of a run of a program with 64 MiB of temporary values, after the first.
STEP_FAULTS = """
import resource
import jax, jax.numpy as jnp
from maxdiloco.parallel import mesh, processor
jax.config.update("jax_platforms", "cpu")
processor.keep_freed_memory(in_caller=True)
{set_up}
turned = lambda i, y: y[::-1] * 2
step = jax.jit(lambda x: jax.lax.fori_loop(0, 3, turned, jnp.broadcast_to(x, (1024, 8192)))[0])
x, faults = jnp.ones(8192), []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[1:]))
"""


@glibc
def test_a_program_run_in_the_caller_uses_freed_memory_again():
    """64 MiB are 16384 pages. Control: in a thread of XLA's they are new ones."""
    assert pages(STEP_FAULTS.format(set_up="mesh.run_in_caller()")) < 4000
    assert pages(STEP_FAULTS.format(set_up="")) >= 16384


@pytest.mark.parametrize(
    ("hardware", "slices", "expected"), [("cpu", 1, [True]), ("cpu", 2, [False]), ("tpu", 1, [])]
)
def test_a_run_on_the_cpu_keeps_it(hardware, slices, expected, monkeypatch):
    """Programs run in the caller on one device; of several each has a thread."""
    calls, blocking = [], []
    monkeypatch.setattr(
        processor, "keep_freed_memory", lambda *, in_caller: calls.append(in_caller)
    )
    monkeypatch.setattr(startup.mesh_lib, "run_in_caller", lambda: blocking.append(True))
    for name in ("choose_platform", "emulate_devices", "visible_devices"):
        monkeypatch.setattr(startup.mesh_lib, name, lambda cfg, **_: None)
    untouched = SimpleNamespace(jax_num_cpu_devices=-1, jax_platforms="cpu")
    monkeypatch.setattr(startup.mesh_lib.jax, "config", untouched)
    one = contextlib.nullcontext(None)
    monkeypatch.setattr(startup.start, "join_processes", lambda *_, **__: one)
    cfg = config.load([f"hardware={hardware}", f"dcn_diloco_parallelism={slices}"], {})
    with startup.join_processes(cfg):
        assert calls == expected
        assert blocking == [call for call in expected if call]
