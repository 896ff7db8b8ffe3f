"""What a run trains, on which slices and how it synchronises them, known without a device."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from maxdiloco.config import checks, keys
from maxdiloco.config.keys import AXES, Config
from maxdiloco.config.values import show
from maxdiloco.diloco.schedule import Schedule, offsets
from maxdiloco.engine.data_parallel import gradient_bytes
from maxdiloco.errors import ConfigError
from maxdiloco.models import devices
from maxdiloco.models.build import ModelSettings, build_model
from maxdiloco.models.model import Model
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.chips import Chip
from maxdiloco.planning import topology
from maxdiloco.run import model as run_model
from maxdiloco.run import optimizer
from maxdiloco.run import settings as run_settings

MOST_PERIOD = 100_000  # a plan follows each step of a period, seconds for so many; our choice
# The keys that a choice sets, and its fields.
KEYS = {
    "diloco_sync_period": "H",
    "enable_streaming_diloco": "streaming",
    "num_diloco_fragments": "P",
    "num_nonlayer_fragments": "nonlayer",
    "num_communication_overlapping_steps": "tau",
    "diloco_round_overlap": "overlap",
    "diloco_exchange_dtype": "wire",
    "diloco_outer_memory": "memory",
    "diloco_collective": "collective",
}


class Choice(NamedTuple):
    """One way to synchronise.

    Attributes:
      H, P, tau: inner steps between two sends of a fragment, fragments, overlap steps.
      nonlayer: fragments of leaves that belong to no layer.
      wire: wire format.
      overlap: round overlap, one of schedule.ROUND_OVERLAPS.
      streaming: enable_streaming_diloco.
      memory: where the outer state is kept.
      collective: auto, all_gather or reduce_scatter.
    """

    H: int
    P: int
    nonlayer: int
    tau: int
    wire: str
    overlap: str
    streaming: bool
    memory: str = "device"
    collective: str = "auto"

    @property
    def mode(self) -> str:
        """Its name in the table of docs/concepts/modes.md."""
        if self.overlap != "none":
            return self.overlap
        return "overlapped" if self.tau else "streaming" if self.streaming else "DiLoCo"

    @property
    def schedule(self) -> Schedule:
        """Its sends and applies."""
        return Schedule(self.H, self.tau, offsets(self.P, self.H), self.overlap)

    def keys(self) -> dict[str, Any]:
        """The keys of a run."""
        fields = self._asdict()
        return {key: fields[field] for key, field in KEYS.items()}

    def arguments(self) -> list[str]:
        """key=value of what differs from base.yml, and H always."""
        return [
            f"{name}={show(value)}"
            for name, value in self.keys().items()
            if value != keys.KEYS[name].default or name == "diloco_sync_period"
        ]


# DiLoCo without fragments or overlap, the reference.
EXACT = Choice(100, 1, 1, 0, "float32", "none", streaming=False)


class Job(NamedTuple):
    """A run on slices that need not be there.

    mesh: of one replica a slice. per_slice, per_host: devices; a slice counts as a host where hosts
    are not known. num_replicas: of all slices. params, opt_state: of one replica,
    ShapeDtypeStructs. tokens: of a step. transport: xla or host. chip: None without
    compile_topology.
    """

    cfg: Config
    mesh: AbstractMesh
    slices: int
    per_slice: int
    per_host: int
    num_replicas: int
    model: Model
    params: Any
    opt_state: Any
    tokens: int
    transport: str
    chip: Chip | None

    @property
    def asked(self) -> Choice:
        """What the keys say of the synchronisation."""
        return Choice(**{field: vars(self.cfg)[key] for key, field in KEYS.items()})

    @property
    def num_parameters(self) -> int:
        """Of one replica."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))

    @property
    def gradient_bytes(self) -> float:
        """Bytes that a slice sends in a step of data parallelism, enable_diloco=false."""
        sizes = dict(slices=self.slices, accumulation=self.cfg.gradient_accumulation_steps)
        return gradient_bytes(self.params, self.model.gradient_dtype, **sizes)

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
    chip, platform, capability = None, cfg.hardware, ""
    if name := cfg.compile_topology:
        found, slices = topology.find(name), cfg.compile_topology_num_slices
        chip, per_slice, capability = found.chip, found.devices, found.capability
        per_host = min(found.on_host, per_slice)
        platform = "gpu" if found.is_gpu else "tpu"
    else:
        tiers = (cfg.sizes("dcn"), cfg.sizes("ici"))  # an open size counts as one
        slices, per_slice = (math.prod(n for n in tier.values() if n != -1) for tier in tiers)
        slices, per_host = slices if cfg.num_slices == -1 else cfg.num_slices, per_slice
    _check(cfg, slices)
    dcn = mesh_lib.fill(cfg.sizes("dcn"), slices, "dcn")
    ici = mesh_lib.fill(cfg.sizes("ici"), per_slice, "ici")
    mesh = AbstractMesh(tuple(dcn[axis] * ici[axis] for axis in AXES), AXES)
    backend = platform if platform in ("tpu", "gpu") else "cpu"
    devices.check(cfg.max_target_length, mesh.shape["context"])
    model = build_model(
        ModelSettings.from_keys(cfg, backend=backend),
        backend=backend,
        length_shards=mesh.shape["context"],
        compute_capability=capability,
        device_kind=chip.kinds[0] if chip else "",
    )
    params = run_model.parameters(model, mesh)
    inner = run_settings.read_optimizer(cfg)
    rule = optimizer.build(inner, model=model)
    opt_state = optimizer.abstract_state(inner, rule, params, mesh)
    replicas = slices if cfg.num_diloco_replicas == "auto" else cfg.num_diloco_replicas
    sharing = per_slice // mesh.shape["context"]  # groups of devices with sequences of their own
    rows = cfg.per_device_batch_size * sharing * cfg.gradient_accumulation_steps
    return Job(
        cfg=cfg,
        mesh=mesh,
        slices=slices,
        per_slice=per_slice,
        per_host=per_host,
        num_replicas=replicas,
        model=model,
        params=params,
        opt_state=opt_state,
        tokens=replicas * rows * cfg.max_target_length,
        transport=_transport(cfg, replicas, slices, backend),
        chip=chip,
    )


def _transport(cfg: Config, replicas: int, slices: int, backend: str) -> str:
    settings = run_settings.read_exchange(cfg, replicas)
    return settings.resolve(num_slices=slices, platform=backend, joins_processes=True).transport


def _check(cfg: Config, slices: int) -> None:
    if checks.is_island(cfg):
        raise ConfigError(
            "enable_islands=true leaves nothing to plan: islands send through a store, whenever "
            "it is there. Plan the slices of one island with enable_islands=false."
        )
    if cfg.diloco_sync_period > MOST_PERIOD:
        raise ConfigError(
            f"diloco_sync_period={cfg.diloco_sync_period} is too long to plan, step by step. Use "
            f"{MOST_PERIOD} or less."
        )
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
