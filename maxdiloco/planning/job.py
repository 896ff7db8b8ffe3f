"""The job of a plan: a run on slices that may be absent, and the candidates for its exchange."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh

from maxdiloco.config import keys
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

MOST_PERIOD = 100_000  # a plan simulates each step of a period, in seconds for this number
# The keys that a candidate sets, and its fields.
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


@dataclass(frozen=True)
class Candidate:
    """Settings of the synchronisation that a plan rates."""

    H: int  # inner steps between two sends of a fragment
    P: int  # fragments
    nonlayer: int  # fragments that hold no layer
    tau: int  # overlap steps
    wire: str  # wire format
    overlap: str  # round overlap
    streaming: bool
    memory: str = "device"  # of the outer state
    collective: str = "auto"

    @property
    def mode(self) -> str:
        """Return the name of the mode in the table of docs/concepts/modes.md."""
        if self.overlap != "none":
            return self.overlap
        return "overlapped" if self.tau else "streaming" if self.streaming else "DiLoCo"

    @property
    def schedule(self) -> Schedule:
        """Return when fragments are sent and applied."""
        return Schedule(self.H, self.tau, offsets(self.P, self.H), self.overlap)

    def keys(self) -> dict[str, Any]:
        """Return the keys of a run with these settings."""
        return {key: getattr(self, field) for key, field in KEYS.items()}

    def arguments(self) -> list[str]:
        """Return key=value for the period, and for each key that differs from base.yml."""
        return [
            f"{name}={show(value)}"
            for name, value in self.keys().items()
            if value != keys.KEYS[name].default or name == "diloco_sync_period"
        ]


# DiLoCo without fragments or overlap.
EXACT = Candidate(100, 1, 1, 0, "float32", "none", streaming=False)


@dataclass(frozen=True)
class Job:
    """A run on slices that may be absent."""

    cfg: Config
    mesh: AbstractMesh  # of one replica a slice
    slices: int
    per_slice: int  # devices
    per_host: int  # devices; a slice counts as a host if hosts are not known
    num_replicas: int  # of all slices
    model: Model
    params: Any  # of one replica, as ShapeDtypeStructs
    opt_state: Any  # of one replica, as ShapeDtypeStructs
    tokens: int  # of a step
    transport: str
    chip: Chip | None  # None without compile_topology

    @property
    def configured(self) -> Candidate:
        """Return the candidate with the settings of the keys."""
        return Candidate(**{field: vars(self.cfg)[key] for key, field in KEYS.items()})

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of one replica."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))

    @property
    def gradient_bytes(self) -> float:
        """Return the bytes that a slice sends in a step of data parallelism."""
        sizes = dict(slices=self.slices, accumulation=self.cfg.gradient_accumulation_steps)
        return gradient_bytes(self.params, self.model.gradient_dtype, **sizes)

    @property
    def copies(self) -> int:
        """Return how often a device sends its shard: once per own replica and other slice."""
        return self.num_replicas // self.slices * (self.slices - 1)


def describe_job(cfg: Config) -> Job:
    """Return the job of a config, on compile_topology or on a mesh of the config's sizes.

    Nothing is compiled, and no accelerator is used.

    Raises:
      ConfigError: no link separates the replicas, or a plain step would cross it.
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
    dcn = mesh_lib.resolve_sizes(cfg.sizes("dcn"), slices, "dcn")
    ici = mesh_lib.resolve_sizes(cfg.sizes("ici"), per_slice, "ici")
    mesh = AbstractMesh(tuple(dcn[axis] * ici[axis] for axis in AXES), AXES)
    backend = platform if platform in ("tpu", "gpu") else "cpu"
    devices.check(cfg.max_target_length, mesh.shape["context"])
    model = build_model(
        ModelSettings.from_keys(cfg, backend=backend),
        backend=backend,
        length_shards=mesh.shape["context"],
        compute_capability=capability,
        device_kind=chip.device_kinds[0] if chip else "",
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
    if cfg.enable_islands:
        raise ConfigError(
            "enable_islands=true leaves nothing to plan: islands exchange through a store, without "
            "a schedule. Plan the slices of one island with enable_islands=false."
        )
    if cfg.diloco_sync_period > MOST_PERIOD:
        raise ConfigError(
            f"diloco_sync_period={cfg.diloco_sync_period} is too long to plan, step by step. Use "
            f"{MOST_PERIOD} or less."
        )
    if not cfg.enable_diloco:
        raise ConfigError(
            "enable_diloco=false leaves nothing to plan: data parallelism crosses the link in "
            "every step. Use enable_diloco=true; the plan has a row for data parallelism."
        )
    if slices < 2:
        key = "compile_topology_num_slices" if cfg.compile_topology else "dcn_diloco_parallelism"
        raise ConfigError(
            f"{key}={vars(cfg)[key]} is one slice, and a plan needs a link between slices. "
            f"Use {key}=2 or more."
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
