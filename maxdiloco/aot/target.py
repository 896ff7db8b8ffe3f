"""The mesh of a run on compile_topology: devices that need not be there."""

import jax
from jax.sharding import Mesh

from maxdiloco.aot import topology
from maxdiloco.flags import config
from maxdiloco.flags.config import Config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.chips import Chip


def of(cfg: Config) -> tuple[Config, Mesh, Chip]:
    """The config that makes this mesh, the mesh, and the chip that one device is.

    Raises ConfigError for an unknown topology, for sizes of the mesh that it does not have, and
    where its compiler is not installed.
    """
    jax.config.update("jax_platforms", "cpu")  # nothing here runs; other backends may be absent
    name, num_slices = cfg.compile_topology, cfg.compile_topology_num_slices
    if topology.is_gpu(name):  # whose devices do not say in which slice they are
        mesh_lib.fill(mesh_lib.tier(cfg, "dcn"), num_slices, "dcn")
        cfg = config.from_dict(cfg.as_dict() | {"num_slices": num_slices})
    mesh = mesh_lib.build(cfg, topology.devices(name, num_slices))
    return cfg, mesh, topology.chip(name)
