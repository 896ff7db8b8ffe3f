"""The settings that a run reads from its config: a frozen record for each package.

They are read once, at the start. A field named after a key has the value of that key, and
configs/base.yml documents it.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from jax.sharding import Mesh

from maxdiloco.config.keys import Config
from maxdiloco.data.tokenizer import TokenizerSettings
from maxdiloco.diloco import schedule
from maxdiloco.engine.settings import ExchangeSettings
from maxdiloco.errors import ConfigError
from maxdiloco.models.build import ModelSettings
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.mesh import MeshSettings

# None: as the wire format needs it.
_FEEDBACK = MappingProxyType({"auto": None, "always": True, "never": False})
S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class NetworkSettings:
    """How the processes of a run connect and communicate."""

    exchange_interface: str
    exchange_secret_file: str
    peer_port: int | Literal["auto"]
    peer_timeout_seconds: int
    jax_distributed_initialization_timeout: int


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """The keys that determine the sequences of a step, without the mesh."""

    enable_diloco: bool
    num_diloco_replicas: int | Literal["auto"]
    enable_islands: bool
    islands_global_batch_size: int | None
    per_device_batch_size: int
    gradient_accumulation_steps: int
    max_target_length: int


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """The texts of a run.

    Attributes:
      eval_paths: {name: path} of the texts to evaluate on, see Config.eval_paths.
      holds_out: whether one of them is a held-out part of the training text.
    """

    tokenizer: TokenizerSettings
    dataset_type: str
    dataset_path: str
    dataset_mixture: tuple[Any, ...]
    dataset_per_replica: bool
    text_column: str
    data_cache_directory: str
    base_output_directory: str
    max_corrupted_records: int
    data_shuffle_seed: int
    enable_data_shuffling: bool
    packing: bool
    grain_packing_type: str
    grain_worker_count: int
    max_target_length: int
    eval_interval: int
    eval_steps: int
    eval_fraction: float
    eval_paths: Mapping[str, str]
    holds_out: bool


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The inner optimizer and its learning rate."""

    opt_type: str
    learning_rate: float
    learning_rate_schedule_steps: int
    learning_rate_final_fraction: float
    warmup_steps_fraction: float
    lr_schedule_type: str
    wsd_decay_steps_fraction: float
    wsd_decay_style: str
    adam_b1: float
    adam_b2: float
    adam_eps: float
    adam_weight_decay: float
    muon_beta: float
    mu_dtype: str
    gradient_clipping_threshold: float
    optimizer_memory_host_offload: bool


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Losses on held-out text, and samples of the model."""

    eval_interval: int
    eval_steps: int
    sample_prompt: str


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Which states are saved, and which one a run starts from."""

    enable_checkpointing: bool
    async_checkpointing: bool
    checkpoint_period: int
    max_num_checkpoints_to_keep: int | Literal["all"]
    save_checkpoint_on_completion: bool
    load_parameters_path: str
    load_full_state_path: str


@dataclasses.dataclass(frozen=True)
class MetricsSettings:
    """Logs, metrics and profiles that a run writes while it trains."""

    log_period: int
    enable_tensorboard: bool
    enable_wandb: bool
    profiler: str
    skip_first_n_steps_for_profiler: int
    profiler_steps: int
    show_memory: bool


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """All settings that a run reads from its config.

    Attributes:
      config: the keys, for the files of the run and for comparisons with a checkpoint.
      exchange: settings of the exchange of outer gradients; None with data parallelism.
    """

    config: Config
    batch: BatchSettings
    model: ModelSettings
    data: DataSettings
    optimizer: OptimizerSettings
    exchange: ExchangeSettings | None
    evaluation: EvaluationSettings
    checkpoint: CheckpointSettings
    metrics: MetricsSettings
    init_weights_seed: int
    nan_policy: str

    @property
    def tokenizer(self) -> TokenizerSettings:
        """Return the settings of the tokenizer."""
        return self.data.tokenizer

    @property
    def is_island(self) -> bool:
        """Whether the run is an island, so that the islands' log decides its number of steps."""
        return self.batch.enable_islands

    def with_model(self, **changes: Any) -> "RunSettings":
        """Return settings with other values for some fields of the model's config."""
        return dataclasses.replace(self, model=self.model.with_config(**changes))


def _read(cls: type[S], cfg: Config, **others: Any) -> S:
    """Return a record whose fields are keys of a config, except `others`."""
    names = {field.name for field in dataclasses.fields(cls)} - others.keys()
    return cls(**{name: getattr(cfg, name) for name in names}, **others)


def read_mesh(cfg: Config) -> MeshSettings:
    """Return the devices that a run uses, and the axes of its mesh."""
    return MeshSettings(
        hardware=cfg.hardware,
        dcn=cfg.sizes("dcn"),
        ici=cfg.sizes("ici"),
        num_slices=cfg.num_slices,
        enable_diloco=cfg.enable_diloco,
        hide_transfers=not cfg.optimizer_memory_host_offload,
    )


def read_network(cfg: Config) -> NetworkSettings:
    """Return how the processes of a run connect and communicate."""
    return _read(NetworkSettings, cfg)


def read_batch(cfg: Config) -> BatchSettings:
    """Return the keys that determine the sequences of a step."""
    return _read(BatchSettings, cfg)


def read_model(cfg: Config, mesh: Mesh) -> ModelSettings:
    """Return the model of a run on the devices of a mesh."""
    return ModelSettings.from_keys(cfg, backend=mesh_lib.backend(mesh))


def read_data(cfg: Config) -> DataSettings:
    """Return the texts of a run."""
    return _read(
        DataSettings,
        cfg,
        tokenizer=read_tokenizer(cfg),
        eval_paths=cfg.eval_paths(),
        holds_out=cfg.holds_out(),
    )


def read_tokenizer(cfg: Config) -> TokenizerSettings:
    """Return the tokenizer of a run."""
    return _read(TokenizerSettings, cfg)


def read_optimizer(cfg: Config) -> OptimizerSettings:
    """Return the inner optimizer of a run."""
    return _read(OptimizerSettings, cfg)


def read_exchange(cfg: Config, num_replicas: int) -> ExchangeSettings:
    """Return the settings of the exchange. `auto` of collective and transport is not resolved.

    Raises:
      ValueError: the values cannot be combined.
    """
    lr, momentum = cfg.diloco_outer_lr, cfg.diloco_outer_momentum
    return ExchangeSettings(
        num_replicas=num_replicas,
        sync_period=cfg.diloco_sync_period,
        num_fragments=cfg.num_diloco_fragments if cfg.enable_streaming_diloco else 1,
        overlap_steps=cfg.num_communication_overlapping_steps,
        alpha=cfg.communication_overlapping_alpha,
        round_overlap=cfg.diloco_round_overlap,
        outer_optimizer=cfg.diloco_outer_optimizer,
        outer_lr=None if lr == "auto" else lr,
        outer_momentum=None if momentum == "auto" else momentum,
        exchange_dtype=cfg.diloco_exchange_dtype,
        error_feedback=_FEEDBACK[cfg.diloco_error_feedback],
        aggregation=cfg.diloco_aggregation,
        collective=cfg.diloco_collective,
        transport=cfg.diloco_transport,
        sequential_layers=cfg.use_sequential_layers,
        num_nonlayer_fragments=cfg.num_nonlayer_fragments,
        outer_memory=cfg.diloco_outer_memory,
    )


def with_replicas(cfg: Config, num_replicas: int) -> Config:
    """Return a config in which `auto` is replaced for the outer learning rate and momentum.

    The values depend on the number of replicas and on the method. The config.yml of a run keeps
    `auto`, so that a run that resumes with another number of replicas uses the values for it.
    """
    if not cfg.enable_diloco:
        return cfg
    exchange = read_exchange(cfg, num_replicas)
    outer = {
        "diloco_outer_lr": exchange.outer_lr,
        "diloco_outer_momentum": exchange.outer_momentum,
    }
    return cfg.model_copy(update=outer)


def read(cfg: Config, mesh: Mesh) -> RunSettings:
    """Read the config of a run on the devices of a mesh.

    Raises:
      ConfigError: the mesh cannot hold the replicas.
    """
    batch = read_batch(cfg)
    exchange = None
    if cfg.enable_diloco:
        exchange = read_exchange(cfg, count_replicas(batch, mesh))
    return RunSettings(
        config=cfg,
        batch=batch,
        model=read_model(cfg, mesh),
        data=read_data(cfg),
        optimizer=read_optimizer(cfg),
        exchange=exchange,
        evaluation=_read(EvaluationSettings, cfg),
        checkpoint=_read(CheckpointSettings, cfg),
        metrics=_read(MetricsSettings, cfg),
        init_weights_seed=cfg.init_weights_seed,
        nan_policy=cfg.nan_policy,
    )


def count_replicas(batch: BatchSettings, mesh: Mesh) -> int:
    """Return the number of replicas; without DiLoCo the size of the mesh axis `diloco`.

    Raises:
      ConfigError: the mesh cannot hold the replicas.
    """
    size = mesh.shape["diloco"]
    if not batch.enable_diloco or batch.num_diloco_replicas == "auto":
        return size
    replicas = batch.num_diloco_replicas
    try:
        schedule.check_replicas(
            replicas,
            size,
            name="num_diloco_replicas",
            axis_size_name="the mesh's diloco size",
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return replicas
