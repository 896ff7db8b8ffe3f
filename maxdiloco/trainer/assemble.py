"""From the flags to the parts of a run: the one place where the config chooses between them.

    # R replicas  B sequences per replica  L tokens
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import outer
from maxdiloco.engine.calls import START, Call
from maxdiloco.engine.data_parallel import DataParallel
from maxdiloco.engine.diloco import DiLoCo
from maxdiloco.errors import ConfigError
from maxdiloco.flags import checks
from maxdiloco.flags.config import Config
from maxdiloco.metrics.monitor import Monitor
from maxdiloco.metrics.speed import training_flops_per_token
from maxdiloco.models import transformer
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import (
    Rules,
    optimizer_shardings,
    parameter_shardings,
    rules_with,
    spec,
)
from maxdiloco.trainer import inner_step, optimizer
from maxdiloco.trainer.evaluate import Evaluation

OnCompile = Callable[[str, float, jax.stages.Compiled], None]


class Parts(NamedTuple):
    """What a run is made of.

    trainer: DiLoCo or DataParallel. num_replicas M and batch_size B shape a batch [M, B, L].
    params, opt_state: one replica's, as ShapeDtypeStructs with shardings. init: seed -> state.
    """

    mesh: Mesh
    rules: Rules
    model: Any
    schedule: Callable
    optimizer: Any
    trainer: Any
    num_replicas: int
    batch_size: int
    params: Any
    opt_state: Any
    init: Program
    monitor: Monitor
    evaluation: Evaluation


def assemble(cfg: Config, mesh: Mesh, *, total_steps: int, on_compile: OnCompile) -> Parts:
    """Build model, optimizers and trainer on the mesh; nothing is allocated or compiled yet.

    total_steps: length of the learning-rate schedule [inner steps] when the config leaves it open.
    Raises ConfigError for values that only the devices or the model's shapes can refuse.
    """
    backend = mesh.devices.flat[0].platform
    check_devices(cfg, mesh)
    model = transformer.build(cfg, backend="gpu" if backend in ("cuda", "rocm") else backend)
    rules = rules_with(cfg.logical_axis_rules)
    inner_optimizer = optimizer.build(cfg, total_steps, model=model)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    shardings = parameter_shardings(model.logical_axes, shapes, mesh, rules)
    lies = optimizer_shardings(inner_optimizer, shapes, shardings, mesh)
    step = inner_step.make(
        model,
        inner_optimizer,
        accumulation=cfg.gradient_accumulation_steps,
        nan_policy=cfg.nan_policy,
    )
    M = count_replicas(cfg, mesh)
    trainer = _trainer(cfg, mesh, model, step, M, on_compile)
    params = _laid_out(shapes, shardings)
    opt_state = _laid_out(jax.eval_shape(inner_optimizer.init, shapes), lies)
    trainer.bind(params, opt_state)
    return Parts(
        mesh=mesh,
        rules=rules,
        model=model,
        schedule=optimizer.learning_rate_schedule(cfg, total_steps),
        optimizer=inner_optimizer,
        trainer=trainer,
        num_replicas=M,
        batch_size=sequences_per_replica(cfg, mesh),
        params=params,
        opt_state=opt_state,
        init=_init_program(trainer, model, inner_optimizer),
        monitor=Monitor(
            trainer,
            _abstract_batch(cfg, mesh, rules),
            stop_on_nan=cfg.nan_policy == "stop",
            on_compile=on_compile,
        ),
        evaluation=Evaluation(
            model,
            mesh,
            rules,
            rows=M * sequences_per_replica(cfg, mesh) // cfg.gradient_accumulation_steps,
            length=cfg.max_target_length,
            num_batches=cfg.eval_steps,
            on_compile=on_compile,
        ),
    )


def check_devices(cfg: Config, mesh: Mesh) -> None:
    """Raise ConfigError for what the compiler of these devices cannot do."""
    together = mesh.size // (mesh.shape["diloco"] if cfg.enable_diloco else 1)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu and cfg.weight_dtype == "bfloat16" and together > 1:
        raise ConfigError(
            f"weight_dtype=bfloat16 on {together} CPU devices that hold one replica: XLA for CPU "
            f"aborts while it compiles their sums of gradients. Use weight_dtype=float32, or one "
            f"device a replica."
        )


def count_replicas(cfg: Config, mesh: Mesh) -> int:
    """M; without DiLoCo the slots of the mesh, whose rows are put together.

    Raises ConfigError when M is not a multiple of the mesh's diloco size.
    """
    slots = mesh.shape["diloco"]
    if not cfg.enable_diloco or cfg.num_diloco_replicas == -1:
        return slots
    checks.check_replicas(cfg.num_diloco_replicas, slots, "the mesh's diloco size")
    return cfg.num_diloco_replicas


def sequences_per_replica(cfg: Config, mesh: Mesh) -> int:
    """B: per device, times the devices of a mesh slot, times the micro-batches."""
    devices = mesh.size // mesh.shape["diloco"]
    return cfg.per_device_batch_size * devices * cfg.gradient_accumulation_steps


def _trainer(cfg, mesh, model, step, M, on_compile):
    if not cfg.enable_diloco:
        return DataParallel(step, mesh=mesh, on_compile=on_compile)
    return DiLoCo(
        step,
        num_replicas=M,
        sync_period=cfg.diloco_sync_period,
        num_fragments=cfg.num_diloco_fragments if cfg.enable_streaming_diloco else 1,
        overlap_steps=cfg.num_communication_overlapping_steps,
        alpha=cfg.communication_overlapping_alpha,
        outer_optimizer=outer.outer_optimizer(
            cfg.diloco_outer_optimizer, lr=cfg.diloco_outer_lr, momentum=cfg.diloco_outer_momentum
        ),
        outer_overlap=cfg.diloco_outer_overlap,
        exchange_dtype=cfg.diloco_exchange_dtype,
        sequential_layers=cfg.use_sequential_layers,
        num_nonlayer_fragments=cfg.num_nonlayer_fragments,
        layer_axis=model.layer_axis,
        mesh=mesh,
        outer_memory=cfg.diloco_outer_memory,
        on_compile=on_compile,
    )


def _laid_out(shapes, shardings):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def _init_program(trainer, model, inner_optimizer) -> Program:
    def make(seed):
        params = model.init(jax.random.key(seed))
        return params, inner_optimizer.init(params)

    # Runs once. LLVM takes 10 CPU seconds to optimise the draws of a small model, and 1.4 not to.
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    on_cpu = trainer.mesh.devices.flat[0].platform == "cpu"
    return trainer.init_program(make, compiler_options=fast if on_cpu else None)


def initial_state(parts: Parts, seed: int) -> Any:
    """The state before the first step of a fresh run."""
    return parts.init(np.uint32(seed))


def state_with(parts: Parts, params: Any) -> Any:
    """The state before the first step, from given parameters of one replica, which are donated."""

    def make(params):
        return params, parts.optimizer.init(params)

    return parts.trainer.init_program(make, donate=(0,))(params)


def calls(cfg: Config, parts: Parts) -> list[Call]:
    """Every program of a run: those of the steps first, then what it does beside and before them.

    Saving has none of its own, but for the outer parameters in eager mode; for that of restoring
    see checkpoint.arrays.calls.
    """
    trainer, period = parts.trainer, cfg.diloco_sync_period if cfg.enable_diloco else 1
    evaluations = 0.0 if cfg.eval_interval == -1 else period / cfg.eval_interval
    saves = period / cfg.checkpoint_period if cfg.enable_checkpointing else 0.0
    out = trainer.calls(abstract_batch(cfg, parts))
    out += parts.monitor.calls(period=period, log_period=cfg.log_period)
    if evaluations or saves:
        out += trainer.outer_calls(evaluations + saves)
    if evaluations:
        out += parts.evaluation.calls(trainer.abstract_outer_params, evaluations)
    return [*out, Call(parts.init, (np.uint32(0),), 0, START)]


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
    """Sharding of a batch [R, B, L]."""
    rows = spec(("batch", "length"), rules, without=("diloco",))
    return NamedSharding(mesh, P("diloco", *rows))


def abstract_batch(cfg: Config, parts: Parts) -> dict[str, jax.ShapeDtypeStruct]:
    """The batch of a step, leaves [R, B, L]."""
    return _abstract_batch(cfg, parts.mesh, parts.rules)


def _abstract_batch(cfg, mesh, rules):
    shape = (count_replicas(cfg, mesh), sequences_per_replica(cfg, mesh), cfg.max_target_length)
    rows_RBL = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh, rules))
    return {"tokens": rows_RBL, "segment_ids": rows_RBL}


def schedule_steps(cfg: Config, total_steps: int) -> int:
    """Length of the learning-rate schedule [inner steps], which is a constant of the programs."""
    given = cfg.learning_rate_schedule_steps
    return total_steps if given == -1 else given


def flops_per_token(cfg: Config, params: Any) -> float:
    """Model FLOPs of forward and backward for one token, see speed.training_flops_per_token."""
    matmul = sum(math.prod(x.shape) for x in jax.tree.leaves(params) if len(x.shape) > 1)
    if not cfg.logits_via_embedding:
        matmul -= cfg.vocab_size * cfg.base_emb_dim  # the input embedding is a look-up
    return training_flops_per_token(
        matmul,
        cfg.base_num_decoder_layers,
        cfg.base_num_query_heads * cfg.head_dim,
        cfg.max_target_length,
    )
