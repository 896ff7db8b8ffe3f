"""The table of the chips that a run may use: rates, memory, and options of their compilers."""

import os
import re
from typing import NamedTuple


class Chip(NamedTuple):
    """One JAX device. Fields that only compile reports need are None for chips without reports.

    Attributes:
      device_kinds: its names in jax.Device.device_kind.
      peak_flops: dense bfloat16 FLOP/s.
      hbm_gib: memory that a program may use [GiB].
      clock_hz: clock of the compiler's estimated cycles.
      ici_gbps: rate of all ICI links of the device together, one way [Gbit/s].
      options: (name, value) of the compiler's options for the programs of a step.
      bandwidth: of its memory [bytes/s].
      eight_bit: formats that are faster than bfloat16, see eight_bit_formats.
    """

    device_kinds: tuple[str, ...]
    peak_flops: float
    hbm_gib: float | None = None
    clock_hz: float | None = None
    ici_gbps: float | None = None
    options: tuple[tuple[str, str], ...] = ()
    bandwidth: float | None = None
    eight_bit: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether the compiler estimates the time of a program, which it does only for TPUs."""
        return self.clock_hz is not None

    @property
    def hbm(self) -> int:
        """Memory that a program may use [bytes]."""
        return int(self.hbm_gib * 2**30)


# TPU: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, "peak compute per chip (bf16)", "HBM
# bandwidth" and ICI. A device is a chip, except on v2, v3 and TPU7x, where it is one of a chip's
# two TensorCores. HBM as in libtpu's error for a program that is too big; the clock is the peak
# over the FLOPs of a cycle. v5e's compiler leaves 16 of 128 MiB to an operation; with twice as
# much, products are not cut into small pieces. It makes one operation of the two products of an
# MLP, which takes longer than the two apart (benchmarks/results/compile_estimates.md).
# GPU: NVIDIA's data sheets, Tensor Core bfloat16 without sparsity, sums in float32; float16 for a
# T4, which has no bfloat16.
_V5E_OPTIONS = (
    ("xla_tpu_scoped_vmem_limit_kib", "32768"),
    ("xla_tpu_dot_dot_fusion", "false"),
)
# libtpu's scheduler puts the end of a transfer to other slices as far from its start as it believes
# that it takes: by its figures for DCN, 51 Gbit/s, or for PCIe, 32 GB/s, whichever is slower. This
# factor of the second gives every transfer the whole step
# (benchmarks/results/compile_estimates.md). A process reads it at its first compile, so it cannot
# be an option of one program.
_SLOW_LINK = ("xla_tpu_pcie_bandwidth_multiplier", "0.00001")
# Formats of 8 bits. For TPUs: those with twice the operations of bfloat16 in JAX's own table
# (jax/_src/pallas/mosaic/tpu_info.py), in which v4 has neither and v6e computes fp8 as bfloat16.
# For NVIDIA: the first compute capability whose Tensor Cores have it (Turing, Ada; data sheets).
_CUDA_SINCE = {"int8": 7.5, "fp8": 8.9}
CHIPS = {
    "v2": Chip(("TPU v2",), 46e12 / 2),
    "v3": Chip(("TPU v3",), 123e12 / 2),
    "v4": Chip(("TPU v4",), 275e12, 30.75, 1.05e9, 2400, bandwidth=1200e9),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197e12, 15.75, 1.5e9, 1600, _V5E_OPTIONS, 800e9,
                ("int8",)),
    "v5p": Chip(("TPU v5", "TPU v5p"), 459e12, 95.74, 1.75e9, 4800, bandwidth=2765e9,
                eight_bit=("int8",)),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 918e12, 31.25, 1.75e9, 3584, bandwidth=1600e9,
                eight_bit=("int8",)),
    "tpu7x": Chip(("TPU7x",), 2307e12 / 2, 94.75, 2.2e9, 4800, bandwidth=7380e9 / 2,
                  eight_bit=("fp8",)),
    "a100": Chip(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB",
                  "NVIDIA A100 80GB PCIe"), 312e12),
    "h100": Chip(("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"), 989e12),
    "h100-pcie": Chip(("NVIDIA H100 PCIe",), 756e12),
    "b200": Chip(("NVIDIA B200",), 2250e12),
    "t4": Chip(("Tesla T4",), 65e12),
    "l4": Chip(("NVIDIA L4",), 121e12),
    "l40s": Chip(("NVIDIA L40S",), 362e12),
    "a6000": Chip(("NVIDIA RTX A6000",), 154.8e12),
    "rtx3090": Chip(("NVIDIA GeForce RTX 3090",), 71e12),
    "rtx4090": Chip(("NVIDIA GeForce RTX 4090",), 165.2e12),
    "rtx5090": Chip(("NVIDIA GeForce RTX 5090",), 209.5e12),
}  # fmt: skip


def find_chip(device_kind: str) -> Chip | None:
    """Return the chip of a jax.Device; None if it is not in the table."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)


def eight_bit_formats(device_kind: str, capability: str) -> tuple[str, ...]:
    """Return the formats of 8 bits in which a device multiplies faster than in bfloat16.

    Args:
      device_kind: of the jax.Device.
      capability: compute capability of CUDA, as jax.Device has it; "" for TPUs.

    Returns:
      Their names in the key `quantization`.
    """
    if re.fullmatch(r"\d+\.\d+", capability):
        return tuple(name for name, first in _CUDA_SINCE.items() if float(capability) >= first)
    chip = find_chip(device_kind)
    return chip.eight_bit if chip else ()


def step_options(device_kind: str) -> dict[str, str] | None:
    """Return the compiler's options for the programs of a step, except those that the user sets.

    None leaves all of them to the compiler.
    """
    chip = find_chip(device_kind)
    wanted = dict(chip.options) if chip else {}
    return {name: wanted[name] for name in wanted if not _is_given(name)} or None


def hide_transfers() -> None:
    """Let libtpu schedule a transfer to other slices over the whole step; before JAX loads it."""
    name, value = _SLOW_LINK
    if not _is_given(name):
        flags = compiler_flags()["LIBTPU_INIT_ARGS"]
        os.environ["LIBTPU_INIT_ARGS"] = f"{flags} --{name}={value}".strip()


def _is_given(name: str) -> bool:
    """Tell whether the user sets a flag in LIBTPU_INIT_ARGS."""
    return f"--{name}=" in compiler_flags()["LIBTPU_INIT_ARGS"]


def compiler_flags() -> dict[str, str]:
    """Return the flags of XLA and libtpu in the environment; "" for a variable that is not set."""
    return {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
