"""Slices to compile for on a machine without them: their names, chips and devices.

A name is a kind and a size. Names of TPUs are MaxText's. The names of XPK and Cloud TPU
(v5litepod-16), and a kind with its shape, as in GKE (v5p-2x2x4, tpu-v5-lite-podslice-4x4), mean the
same slices. Sizes come from cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. The size of GPUs is
the number in one slice, which is a part of a host or whole hosts. Without a GPU the compiler cannot
try kernels, so it uses its default ones and estimates no time.
"""

import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax

from maxdiloco.errors import ConfigError
from maxdiloco.parallel.chips import CHIPS, Chip


class Tpu(NamedTuple):
    """A kind of TPU.

    Attributes:
      counted: the unit of the number in a name, in words.
      per_chip: number of these units in a chip.
      devices: number of JAX devices in a chip.
      shapes: shapes of its slices, in chips.
    """

    counted: str
    per_chip: int
    devices: int
    shapes: str


_IN_3D = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8"
_IN_2D = "2x2 2x4 4x4 4x8 8x8 8x16 16x16"
TPUS = {
    "v4": Tpu("TensorCores, two a chip", 2, 1, f"{_IN_3D} 4x8x8 8x8x8"),
    "v5e": Tpu("chips", 1, 1, _IN_2D),
    "v5p": Tpu("TensorCores, two a chip", 2, 1, f"{_IN_3D} 4x8x8 8x8x8"),
    "v6e": Tpu("chips", 1, 1, _IN_2D),
    "tpu7x": Tpu("devices, two a chip", 2, 2, _IN_3D),
}


class Gpu(NamedTuple):
    """Facts on a GPU that XLA's compiler needs, as in its own descriptions.

    Attributes:
      chip: the name in CHIPS.
      name: jax.Device.device_kind.
      capability: compute capability of CUDA.
      accelerated: whether it has instructions that only its generation has.
      cores: number of multiprocessors.
      lanes: float32 units of a multiprocessor.
      memory: bytes.
      l2: bytes of the L2 cache.
      sm_limits: threads at once on a multiprocessor, bytes of its shared memory, and the most of
        these bytes that one block may use.
      bandwidth: bandwidth of the memory [bytes/s].
      clock_ghz: clock rate.
      link_gbps: rate of all links to the GPUs of its host, NVLink or PCIe, one way [Gbit/s].
    """

    chip: str
    name: str
    capability: str
    accelerated: bool
    cores: int
    lanes: int
    memory: int
    l2: int
    sm_limits: tuple[int, int, int]
    bandwidth: int
    clock_ghz: float
    link_gbps: float


# github.com/openxla/xla, xla/backends/gpu/target_config/specs; for T4, L4 and GeForce the output of
# deviceQuery of NVIDIA's CUDA samples. Links by NVIDIA's data sheets.
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
# A kind by other names: XPK's --tpu-type and Cloud TPU's accelerator type, GKE's node label.
OTHER_KINDS = {
    "v5litepod": "v5e",
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "a100": "a100-80gb",
    "h100-80gb": "h100",
    "h100-mega-80gb": "h100",
    "h200-141gb": "h200",
}
ON_HOST = 8  # GPUs of a host, joined by NVLink or PCIe
SIZES = (1, 2, 4, *(ON_HOST * hosts for hosts in (1, 2, 4, 8, 16, 32, 64, 128)))
# jax 0.12 has no name for these (pallas.triton.GpuVersion), so Triton kernels compile only on them.
UNNAMED, UNNAMED_SINCE = ("a6000", "rtx5090"), (0, 11)
# The fraction of a GPU's memory that JAX allocates, and the variables that set another one:
# docs.jax.dev/en/latest/gpu_memory_allocation.html.
SHARE, SHARE_KEYS = 0.75, ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# Without these libtpu asks a cloud's metadata server and locks the chip.
_PRETEND = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Slice(NamedTuple):
    """One slice.

    Attributes:
      kind: a key of TPUS or GPUS.
      shape: of TPUs in chips; of GPUs (number of GPUs,).
      devices: number of JAX devices.
      on_host: number of devices of one host.
      chip: the chip of one device, with its memory and links in this slice.
      capability: compute capability of CUDA, as in jax.Device; "" for TPUs.
    """

    kind: str
    shape: tuple[int, ...]
    devices: int
    on_host: int
    chip: Chip
    capability: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether its devices are GPUs."""
        return self.kind in GPUS


def find(name: str) -> Slice:
    """Return a slice by any of its names.

    Raises:
      ConfigError: the name is unknown; the message lists the names of its kind, or the kinds.
    """
    kind, _, size = name.rpartition("-")
    kind = OTHER_KINDS.get(kind, kind)
    if kind not in TPUS and kind not in GPUS:
        raise ConfigError(
            f"compile_topology={name} is not known. Use a kind and its size, as v5e-16, "
            f"v5litepod-16 or h100-8; kinds: {', '.join([*TPUS, *GPUS])}."
        )
    known = names(kind)
    for other, shape in known.items():
        if size in (_written(shape), other.removeprefix(f"{kind}-")):
            return _gpus(kind, *shape) if kind in GPUS else _tpus(kind, shape)
    if kind in GPUS:
        counted = "GPUs of one slice"
        use = f"{', '.join(map(str, SIZES))}, as {kind}-{ON_HOST}"
    else:
        counted = TPUS[kind].counted
        use = f"{', '.join(known)}, or a shape as {kind}-{TPUS[kind].shapes.split()[1]}"
    raise ConfigError(
        f"compile_topology={name} is not known: {kind} counts {counted}. Use one of {use}."
    )


def names(kind: str) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of a kind's slices, smallest first. Names of TPUs are MaxText's."""
    if kind in GPUS:
        return {f"{kind}-{size}": (size,) for size in SIZES}
    shapes = [tuple(map(int, text.split("x"))) for text in TPUS[kind].shapes.split()]
    return {f"{kind}-{math.prod(shape) * TPUS[kind].per_chip}": shape for shape in shapes}


def larger(name: str, num_devices: float) -> str:
    """Return the smallest known slice of the kind with this many devices; "" without one."""
    same_kind = names(find(name).kind)
    return next((known for known in same_kind if find(known).devices >= num_devices), "")


def _written(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _tpus(kind: str, shape: tuple[int, ...]) -> Slice:
    """Return a slice of TPUs, with the ICI links of its corner.

    The corner is the slowest chip, and a collective waits for it. A dim of a v5e or v6e slice is a
    ring if its length is 16. In other slices all dims are rings if each is a multiple of 4
    (cloud.google.com/tpu/docs/{v5e,v6e,v4,v5p,tpu7x}, "slice topology").
    """
    rings = [all(size % 4 == 0 for size in shape)] * len(shape)
    if kind in ("v5e", "v6e"):
        rings = [size == 16 for size in shape]
    links = sum(2 if ring else min(size - 1, 1) for size, ring in zip(shape, rings, strict=True))
    torus_gbps = CHIPS[kind].ici_gbps  # for a chip with two links in each dim
    chip = CHIPS[kind]._replace(ici_gbps=torus_gbps * links / (2 * len(shape)))
    of_chip, chips_on_host = TPUS[kind].devices, 8 if shape == (2, 4) else 4
    return Slice(kind, shape, math.prod(shape) * of_chip, chips_on_host * of_chip, chip)


def _gpus(kind: str, size: int) -> Slice:
    """Return a slice of GPUs, with the memory that JAX allocates.

    Raises:
      ConfigError: the allocated share is not in (0, 1].
    """
    gpu, share = GPUS[kind], SHARE
    if key := next((key for key in SHARE_KEYS if os.environ.get(key)), ""):
        try:
            share = float(os.environ[key])
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            value = os.environ[key]
            raise ConfigError(f"{key}={value} must be above 0 and at most 1. Use 0.9, say.")
    hbm_gib = gpu.memory * share / 2**30
    chip = CHIPS[gpu.chip]._replace(
        hbm_gib=hbm_gib, ici_gbps=gpu.link_gbps, bandwidth=gpu.bandwidth
    )
    return Slice(kind, (size,), size, min(size, ON_HOST), chip, gpu.capability)


def target_config(gpu: Gpu) -> str:
    """Return the stream_executor.GpuTargetConfigProto of a GPU, as text."""
    extension = "ACCELERATED_FEATURES" if gpu.accelerated else "NONE"
    major, minor = gpu.capability.split(".")
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {gpu.sm_limits[0]}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.sm_limits[1]}
  shared_memory_per_block_optin: {gpu.sm_limits[2]}
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


def check_experts(name: str, num_experts: int) -> None:
    """Raise ConfigError for experts on absent GPUs for which JAX has no name."""
    found = find(name)
    if found.kind in UNNAMED and num_experts > 1 and jax.__version_info__ >= UNNAMED_SINCE:
        raise ConfigError(
            f"num_experts={num_experts} cannot be compiled for compile_topology={name}: jax "
            f"{jax.__version__} compiles the kernels of experts for this GPU only on a machine "
            f"that has one. Use another kind, as l4-{found.devices}, or jax 0.10.2 on Python 3.11."
        )


def devices(name: str, num_slices: int) -> list[jax.Device]:
    """Return the devices of `num_slices` slices, slice by slice, to compile but not to run.

    Raises:
      ConfigError: the name is unknown, or libtpu or JAX's plugin for CUDA is not installed.
    """
    found, needs, modules, extra = find(name), "libtpu", ["libtpu"], "tpu"
    if found.is_gpu:
        needs, extra = "JAX's plugin for CUDA", "cudacompile"
        modules = ["jax_cuda12_plugin", "jax_cuda13_plugin"]
    if not any(map(importlib.util.find_spec, modules)):
        raise ConfigError(
            f"compile_topology={name} needs {needs}, which is not installed. Install the extra: "
            f"pip install -e '.[{extra}]' in a checkout of maxdiloco."
        )
    from jax.experimental import topologies

    if found.is_gpu:
        hosts = max(1, found.devices // ON_HOST)
        options = {
            "platform": "cuda",
            "target_config": target_config(GPUS[found.kind]),
            "topology": f"{num_slices}x{hosts}x{found.devices // hosts}",
        }
    else:
        libtpu_name = f"{found.kind}:{_written(found.shape)}"
        options = {"platform": "tpu", "topology_name": libtpu_name, "num_slices": num_slices}
        if found.kind == "v4":  # a real chip joins its two cores into one device
            options["chip_config_name"] = "megacore"
    with _pretending():
        return list(topologies.get_topology_desc(**options).devices)


@contextmanager
def _pretending() -> Iterator[None]:
    """Set the variables of _PRETEND that the user has not set."""
    missing = {key: value for key, value in _PRETEND.items() if key not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for key in missing:
            del os.environ[key]
