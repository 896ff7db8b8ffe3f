"""The host that XLA:CPU computes on: what its processor is good at."""

import pathlib
import re

CPUINFO = pathlib.Path("/proc/cpuinfo")


def host_cpuinfo() -> str:
    """The text of /proc/cpuinfo; "" where there is none."""
    return CPUINFO.read_text() if CPUINFO.exists() else ""


def float32_is_faster(cpuinfo: str) -> bool:
    """Whether an x86 processor multiplies matrices faster in float32 than in bfloat16.

    Intel's AVX512-BF16 multiplies no more numbers a cycle than float32 does, and its factors have
    to be interleaved; AMX multiplies more (benchmarks/README.md). Not measured: that AMD's
    AVX512-BF16 is faster than float32, and a processor without instructions for bfloat16 slower.
    False where the text does not say what the processor has, as on Arm.
    """
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None:
        return False
    has = set(flags.group(1).split())
    on_amd = re.search(r"^vendor_id\s*: AuthenticAMD$", cpuinfo, re.MULTILINE) is not None
    return not ("amx_bf16" in has or (on_amd and "avx512_bf16" in has))
