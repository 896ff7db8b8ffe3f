"""GPUs to compile for on a machine without them: their names, what the compiler asks, devices.

A name is a kind and the number of GPUs of one slice, those of one host or of whole hosts. No GPU
is there to try kernels on, so the compiler takes its default ones and estimates no time.
"""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from maxdiloco.errors import ConfigError
from maxdiloco.parallel.chips import CHIPS, Chip

ON_HOST = 8  # GPUs of a host, joined by NVLink or PCIe
SIZES = (1, 2, 4, *(ON_HOST * hosts for hosts in (1, 2, 4, 8, 16, 32, 64, 128)))
FROM_MACHINE = (0, 11)  # JAX that takes the GPU of a Triton kernel from the machine
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# The part of a GPU's memory that JAX takes when it starts, and where the user says another:
# docs.jax.dev/en/latest/gpu_memory_allocation.html.
SHARE, SHARE_KEYS = 0.75, ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


class Gpu(NamedTuple):
    """What XLA's compiler asks of a GPU, as its own descriptions have it.

    chip: the name in CHIPS. name: jax.Device.device_kind. capability: of CUDA. accelerated:
    whether it has instructions of that generation alone. cores: multiprocessors. lanes: float32
    units of one. memory, l2: bytes. room: threads that run at once on a multiprocessor, bytes of
    its shared memory, and what one block may take of them. bandwidth: bytes a second. link_gbps: to
    the GPUs of its host, NVLink or PCIe, all links together, one way [1e9 bits per second].
    """

    chip: str
    name: str
    capability: str
    accelerated: bool
    cores: int
    lanes: int
    memory: int
    l2: int
    room: tuple[int, int, int]
    bandwidth: int
    clock_ghz: float
    link_gbps: float


# github.com/openxla/xla, xla/backends/gpu/target_config/specs; of T4, L4 and GeForce what
# deviceQuery of NVIDIA's CUDA samples prints. Links by NVIDIA's data sheets.
_TURING, _AMPERE, _HOPPER = (1024, 65536, 65536), (2048, 167936, 166912), (2048, 233472, 232448)
_SMALL = (1536, 102400, 101376)  # Ampere, Ada and Blackwell for desktops
GPUS = {
    "a100-40gb": Gpu("a100", "NVIDIA A100-SXM4-40GB", "8.0", False, 108, 64, 42331013120, 41943040,
                     _AMPERE, 1555200000000, 1.41, 2400),
    "a100-80gb": Gpu("a100", "NVIDIA A100-SXM4-80GB", "8.0", False, 108, 64, 85100068864, 41943040,
                     _AMPERE, 2039040000000, 1.41, 2400),
    "h100": Gpu("h100", "NVIDIA H100 80GB HBM3", "9.0", True, 132, 128, 84942979072, 52428800,
                _HOPPER, 3352320000000, 1.98, 3600),
    "h200": Gpu("h100", "NVIDIA H200", "9.0", True, 132, 128, 151397597184, 52428800,
                _HOPPER, 4800000000000, 1.98, 3600),
    "b200": Gpu("b200", "NVIDIA B200", "10.0", True, 148, 128, 191514411008, 132644864,
                _HOPPER, 7672320000000, 1.965, 7200),
    "t4": Gpu("t4", "Tesla T4", "7.5", False, 40, 64, 15843721216, 4194304,
              _TURING, 320064000000, 1.59, 128),
    "l4": Gpu("l4", "NVIDIA L4", "8.9", False, 58, 128, 23583784960, 50331648,
              _SMALL, 300048000000, 2.04, 256),
    "a6000": Gpu("a6000", "NVIDIA RTX A6000", "8.6", False, 84, 128, 51041271808, 6291456,
                 _SMALL, 768096000000, 1.8, 256),
    "rtx5090": Gpu("rtx5090", "NVIDIA GeForce RTX 5090", "12.0", False, 170, 128, 33677180928,
                   100663296, _SMALL, 1792128000000, 2.655, 512),
}  # fmt: skip
OTHER_KINDS = {
    "a100": "a100-80gb",
    "h100-80gb": "h100",
    "h100-mega-80gb": "h100",
    "h200-141gb": "h200",
}


def kind_of(name: str) -> str | None:
    """The kind in GPUS of a name, as `h100` of h100-8; None for what names no GPU."""
    kind = name.rpartition("-")[0]
    kind = OTHER_KINDS.get(kind, kind)
    return kind if kind in GPUS else None


def size_of(name: str) -> int:
    """GPUs of one slice. Raises ConfigError for a number that no hosts have."""
    size = name.rpartition("-")[2]
    if size in map(str, SIZES):
        return int(size)
    raise ConfigError(
        f"compile_topology={name} is not known: {kind_of(name)} counts GPUs of one slice. Use one "
        f"of {', '.join(map(str, SIZES))}, as {kind_of(name)}-{ON_HOST}."
    )


def chip(name: str, environ: Mapping[str, str] = os.environ) -> Chip:
    """The chip that one GPU is, with the memory that JAX takes of it and its links.

    Raises ConfigError for an unknown name and for a share of memory that is no number in (0, 1].
    """
    size_of(name)
    gpu, share = GPUS[kind_of(name)], SHARE
    if key := next((key for key in SHARE_KEYS if environ.get(key)), ""):
        try:
            share = float(environ[key])
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise ConfigError(f"{key}={environ[key]} must be above 0 and at most 1. Use 0.9, say.")
    return CHIPS[gpu.chip]._replace(hbm_gib=gpu.memory * share / 2**30, ici_gbps=gpu.link_gbps)


def devices(name: str, num_slices: int) -> list[Any]:
    """The jax.Device objects of `num_slices` slices, slice by slice; nothing can run on them.

    Raises ConfigError for an unknown name, and for a JAX without a plugin for CUDA or after 0.10.
    """
    size = size_of(name)
    if not any(map(importlib.util.find_spec, PLUGINS)):
        raise ConfigError(
            f"compile_topology={name} needs JAX's plugin for CUDA, which is not installed. Install "
            f"the extra: pip install -e '.[cudacompile]' in a checkout of maxdiloco."
        )
    if jax.__version_info__ >= FROM_MACHINE:
        raise ConfigError(
            f"compile_topology={name} cannot be compiled for by jax {jax.__version__}, which makes "
            f"Triton kernels for the GPU of this machine alone. Use jax 0.10.2, as the extra has "
            f"it: pip install -e '.[cudacompile]'."
        )
    from jax.experimental import topologies

    hosts = max(1, size // ON_HOST)
    slices = topologies.get_topology_desc(
        platform="cuda",
        target_config=target_config(GPUS[kind_of(name)]),
        topology=f"{num_slices}x{hosts}x{size // hosts}",
    )
    return list(slices.devices)


def target_config(gpu: Gpu) -> str:
    """The stream_executor.GpuTargetConfigProto of a GPU, as text."""
    extension = "ACCELERATED_FEATURES" if gpu.accelerated else "NONE"
    major, minor = gpu.capability.split(".")
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {gpu.room[0]}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.room[1]}
  shared_memory_per_block_optin: {gpu.room[2]}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.lanes}
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""
