"""Facts and settings of the host for XLA:CPU: its processor, and its heap."""

import ctypes
import os
import pathlib
import platform
import re

CPUINFO = pathlib.Path("/proc/cpuinfo")
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # parameters of glibc's mallopt(3)


def host_cpuinfo() -> str:
    """Return the text of /proc/cpuinfo; "" on systems without it."""
    return CPUINFO.read_text() if CPUINFO.exists() else ""


def float32_is_faster(cpuinfo: str) -> bool:
    """Tell whether an x86 processor multiplies matrices faster in float32 than in bfloat16.

    Intel's AVX512-BF16 multiplies no more numbers a cycle than float32, and its factors must be
    interleaved; without bfloat16 instructions they must be widened. With AMX, and with AMD's
    AVX512-BF16, bfloat16 is faster (benchmarks/results/step_time.md).

    Args:
      cpuinfo: of host_cpuinfo. For a text without flags the answer is False.
    """
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None:
        return False
    has = set(flags.group(1).split())
    on_amd = re.search(r"^vendor_id\s*: AuthenticAMD$", cpuinfo, re.MULTILINE) is not None
    return not ("amx_bf16" in has or (on_amd and "avx512_bf16" in has))


def keep_freed_memory(*, in_caller: bool) -> None:
    """Let glibc keep the memory that XLA frees after a step, for the next step.

    Otherwise each step gets its temporary arrays as new pages, which the kernel clears one by one
    (benchmarks/results/step_time.md). Call it before JAX's backends start. It does nothing without
    glibc, or if the user sets GLIBC_TUNABLES.

    Args:
      in_caller: whether programs run in the calling thread, see mesh.run_in_caller. Otherwise
        threads share the heaps that exist, since no setting keeps new heaps from mapping large
        blocks. The thread of command_line.guarded has made a second heap by then, which does map
        them (benchmarks/results/step_time.md). With one heap, threads that compile wait for each
        other, and compiling takes half as long again.
    """
    if platform.libc_ver()[0] != "glibc" or "GLIBC_TUNABLES" in os.environ:
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(TRIM_THRESHOLD, -1)  # never give the end of the heap back
    libc.mallopt(MMAP_MAX, 0)
    if not in_caller:
        libc.mallopt(ARENA_MAX, 1)
