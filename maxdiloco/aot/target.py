"""The mesh of a run on compile_topology: devices that need not be there."""

import jax
from jax.sharding import Mesh

from maxdiloco.aot import topology
from maxdiloco.errors import ConfigError
from maxdiloco.flags import config
from maxdiloco.flags.base_yml import show
from maxdiloco.flags.config import Config
from maxdiloco.flags.hardware import hardware_of
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.chips import Chip


def of(cfg: Config) -> tuple[Config, Mesh, Chip]:
    """The config that makes this mesh, the mesh, and the chip that one device is.

    Raises ConfigError for an unknown topology, for sizes of the mesh that it does not have, for
    arrays in the host memory of GPUs, and where its compiler is not installed.
    """
    jax.config.update("jax_platforms", "cpu")  # nothing here runs; other backends may be absent
    name, num_slices = cfg.compile_topology, cfg.compile_topology_num_slices
    if topology.is_gpu(name):  # whose devices do not say in which slice they are
        _check_memory(cfg)
        mesh_lib.fill(hardware_of(cfg).dcn, num_slices, "dcn")
        cfg = config.from_dict(cfg.as_dict() | {"num_slices": num_slices})
    mesh = mesh_lib.build(hardware_of(cfg), topology.devices(name, num_slices))
    return cfg, mesh, topology.chip(name)


# Values that keep arrays in host memory, and what counts them on the device.
_ON_HOST = (
    ("diloco_outer_memory", "pinned_host", "device"),
    ("optimizer_memory_host_offload", True, False),
)


def _check_memory(cfg: Config) -> None:
    """Raise ConfigError for arrays in host memory, which would be counted on the device."""
    values = cfg.as_dict()
    for key, on_host, on_device in _ON_HOST:
        if values[key] == on_host:
            raise ConfigError(
                f"{key}={show(on_host)} cannot be compiled for "
                f"compile_topology={cfg.compile_topology}: without the GPUs the compiler "
                f"has no host memory. Use {key}={show(on_device)}, which counts all on the device, "
                f"or leave compile_topology empty on the GPUs."
            )
