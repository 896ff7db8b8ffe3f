"""The host that XLA:CPU computes on: what its processor is good at, and its memory."""

import ctypes
import os
import pathlib
import platform
import re

CPUINFO = pathlib.Path("/proc/cpuinfo")
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # parameters of glibc's mallopt(3)


def host_cpuinfo() -> str:
    """The text of /proc/cpuinfo; "" where there is none."""
    return CPUINFO.read_text() if CPUINFO.exists() else ""


def float32_is_faster(cpuinfo: str) -> bool:
    """Whether an x86 processor multiplies matrices faster in float32 than in bfloat16.

    Intel's AVX512-BF16 multiplies no more numbers a cycle than float32, and its factors have to be
    interleaved; without bfloat16 instructions they have to be widened. With AMX, and with AMD's
    AVX512-BF16, bfloat16 is faster (benchmarks/results). False where the text does not say.
    """
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None:
        return False
    has = set(flags.group(1).split())
    on_amd = re.search(r"^vendor_id\s*: AuthenticAMD$", cpuinfo, re.MULTILINE) is not None
    return not ("amx_bf16" in has or (on_amd and "avx512_bf16" in has))


def keep_freed_memory(*, in_caller: bool) -> None:
    """Have glibc keep the memory that XLA frees after a step, for the next step.

    Otherwise each step gets its temporary arrays as new pages, which the kernel clears one by one
    (benchmarks/results). Call before JAX's backends start. Nothing is set without glibc, nor beside
    GLIBC_TUNABLES. in_caller: of mesh.run_in_caller; otherwise all threads share the first one's
    heap, since that of another maps large blocks whatever else is set. Threads that compile wait
    for each other there: compiling takes a half longer.
    """
    if platform.libc_ver()[0] != "glibc" or "GLIBC_TUNABLES" in os.environ:
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(TRIM_THRESHOLD, -1)  # never give the end of the heap back
    libc.mallopt(MMAP_MAX, 0)
    if not in_caller:
        libc.mallopt(ARENA_MAX, 1)
