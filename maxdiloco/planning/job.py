"""What a run trains and on which slices, known without a device."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from maxdiloco.aot import topology
from maxdiloco.errors import ConfigError
from maxdiloco.flags import checks
from maxdiloco.flags.checks import AXES
from maxdiloco.flags.config import Config
from maxdiloco.models import on_mesh, over_length, transformer
from maxdiloco.models.transformer import Model
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.chips import Chip
from maxdiloco.trainer import assemble, optimizer


class Job(NamedTuple):
    """A run on slices that need not be there.

    mesh: of one replica a slice. per_slice: devices. num_replicas: of all slices. params,
    opt_state: of one replica, ShapeDtypeStructs. tokens: of a step. carrier: program or host.
    chip: None without compile_topology.
    """

    cfg: Config
    mesh: AbstractMesh
    slices: int
    per_slice: int
    num_replicas: int
    model: Model
    params: Any
    opt_state: Any
    tokens: int
    carrier: str
    chip: Chip | None

    @property
    def num_parameters(self) -> int:
        """Of one replica."""
        return transformer.count_parameters(self.model)

    @property
    def copies(self) -> int:
        """How often a device sends its part of a fragment: its replicas, to each other slice."""
        return self.num_replicas // self.slices * (self.slices - 1)


def of(cfg: Config) -> Job:
    """The job of a config: on compile_topology, or on what the sizes of the mesh say.

    Nothing is compiled and no accelerator is touched. Raises ConfigError for a config that no link
    separates, or whose plain steps cross the link.
    """
    jax.config.update("jax_platforms", "cpu")  # nothing here runs; other backends may be absent
    chip, hardware = None, cfg.hardware
    if name := cfg.compile_topology:
        chip, hardware = topology.chip(name), "gpu" if topology.is_gpu(name) else "tpu"
        slices, per_slice = cfg.compile_topology_num_slices, topology.devices_per_slice(name)
    else:
        slices, per_slice = (_product(mesh_lib.tier(cfg, tier)) for tier in ("dcn", "ici"))
        slices = slices if cfg.num_slices == -1 else cfg.num_slices
    _check(cfg, slices)
    dcn = mesh_lib.fill(mesh_lib.tier(cfg, "dcn"), slices, "dcn")
    ici = mesh_lib.fill(mesh_lib.tier(cfg, "ici"), per_slice, "ici")
    mesh = AbstractMesh(tuple(dcn[axis] * ici[axis] for axis in AXES), AXES)
    backend = hardware if hardware in ("tpu", "gpu") else "cpu"
    over_length.check(cfg.max_target_length, mesh.shape["context"])
    model = transformer.build(
        cfg,
        backend=backend,
        length_shards=mesh.shape["context"],
        compute_capability=topology.compute_capability(cfg.compile_topology),
    )
    params = on_mesh.parameters(model, mesh)
    rule = optimizer.build(cfg, model=model)
    opt_state = optimizer.abstract_state(cfg, rule, params, mesh)
    replicas = slices if cfg.num_diloco_replicas == -1 else cfg.num_diloco_replicas
    sharing = per_slice // mesh.shape["context"]  # groups of devices with sequences of their own
    rows = cfg.per_device_batch_size * sharing * cfg.gradient_accumulation_steps
    return Job(
        cfg=cfg,
        mesh=mesh,
        slices=slices,
        per_slice=per_slice,
        num_replicas=replicas,
        model=model,
        params=params,
        opt_state=opt_state,
        tokens=replicas * rows * cfg.max_target_length,
        carrier=assemble.carrier(cfg.exchange_carrier, backend, joins_processes=True),
        chip=chip,
    )


def _product(sizes: dict[str, int]) -> int:
    """An open size counts as one."""
    return math.prod(1 if size == -1 else size for size in sizes.values())


def _check(cfg: Config, slices: int) -> None:
    if not checks.has_replicas(cfg):
        raise ConfigError(
            "enable_diloco=false leaves nothing to plan: data parallelism crosses the link in "
            "every step. Use enable_diloco=true; the plan has a row for data parallelism."
        )
    if slices < 2:
        key = "compile_topology_num_slices" if cfg.compile_topology else "dcn_diloco_parallelism"
        raise ConfigError(
            f"{key}={vars(cfg)[key]} is one slice, so there is no link to plan for. Use {key}=2 "
            f"or more."
        )
    over_slices = [("dcn", axis) for axis in ("data", "fsdp", "expert", "context", "tensor")]
    for tier, axis in (*over_slices, ("ici", "diloco")):
        name = f"{tier}_{axis}_parallelism"
        if vars(cfg)[name] != 1:
            raise ConfigError(
                f"{name}={vars(cfg)[name]}: the plan is for one slot of dcn_diloco_parallelism on "
                f"each slice. Use {name}=1, or maxdiloco.train_compile, which reads the compiled "
                f"programs."
            )
