"""What XLA's compiler asks of the GPUs that are compiled for without them."""

from typing import NamedTuple


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
