"""Assemble the parts of a run from its settings. Only this file chooses the trainer.

# R replicas  B sequences per replica  L tokens
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.data.tokenizer import build
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.engine.calls import START, Call
from maxdiloco.engine.data_parallel import DataParallel
from maxdiloco.engine.diloco import DiLoCo
from maxdiloco.engine.host_transfer import Messenger
from maxdiloco.engine.settings import HOST
from maxdiloco.engine.trainer import Trainer
from maxdiloco.errors import ConfigError
from maxdiloco.metrics.monitor import Monitor
from maxdiloco.models.devices import shards_on
from maxdiloco.models.model import Model
from maxdiloco.parallel.mesh import joins_processes
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import Rules, spec
from maxdiloco.run import inner_step, island, optimizer
from maxdiloco.run import model as run_model
from maxdiloco.run.evaluation import Evaluation, Sampler
from maxdiloco.run.island import IslandControl, RunProperties
from maxdiloco.run.run_control import RunControl, StepControl
from maxdiloco.run.settings import RunSettings, count_replicas, with_replicas

OnCompile = Callable[[str, float, jax.stages.Compiled], None]


class BatchShape(NamedTuple):
    """The shape [R, B, L] of a batch. Without DiLoCo, R is the size of the mesh axis `diloco`.

    Attributes:
      num_replicas: R.
      sequences: B, per replica. With a global batch of islands: of all islands together. Arrays
        then have more rows if B is not a multiple of the micro-batch.
      length: L.
    """

    num_replicas: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a step in all replicas together."""
        return self.num_replicas * self.sequences * self.length


class Parts(NamedTuple):
    """The parts of a run. Arrays are ShapeDtypeStructs with shardings.

    Attributes:
      learning_rate: returns the rate of the next inner step, given the number of steps done.
      batch: batch of one step, with leaves [R, B, L] and "learning_rate" [R, 1].
      params: parameters of one replica.
      init: returns a state from a seed, or from donated parameters with load_parameters_path.
      sampler: None without sample_prompt.
    """

    mesh: Mesh
    model: Model
    learning_rate: Callable
    trainer: Trainer
    control: RunControl
    shape: BatchShape
    batch: dict[str, jax.ShapeDtypeStruct]
    params: Any
    init: Program
    monitor: Monitor
    evaluation: Evaluation
    sampler: Sampler | None


def assemble(
    settings: RunSettings,
    mesh: Mesh,
    *,
    total_steps: int,
    on_compile: OnCompile,
    messenger: Messenger | None = None,
    tokenizer: Tokenizer | None = None,
    properties: RunProperties | None = None,
) -> Parts:
    """Build the model, the optimizers and the trainer, without allocating or compiling anything.

    Args:
      settings: settings of the run.
      mesh: devices of the run.
      total_steps: see optimizer.learning_rate_schedule.
      on_compile: called after each compile.
      messenger: carries exchanges between processes, see needs_bulk.
      tokenizer: tokenizer of the run; None: it is read here if a part needs it.
      properties: of an island that will train; None otherwise.

    Raises:
      ConfigError: the devices cannot run the model, or as batch_shape.
    """
    shape = batch_shape(settings, mesh)
    model = run_model.build(settings.model, mesh)
    inner_optimizer = optimizer.build(settings.optimizer, model=model)
    params = run_model.parameters(model, mesh)
    opt_state = optimizer.abstract_state(settings.optimizer, inner_optimizer, params, mesh)
    accumulation = micro_batches(settings, mesh)
    step = inner_step.make(
        model,
        inner_optimizer,
        accumulation=accumulation,
        nan_policy=settings.nan_policy,
        skips_empty=settings.batch.islands_global_batch_size is not None,
    )
    if settings.exchange is not None:
        options = dict(on_compile=on_compile, mesh=mesh, layer_axis=model.layer_axis)
        if settings.is_island:
            cfg, fresh = with_replicas(settings.config, 1), inner_optimizer.init
            trainer = island.build(step, cfg, settings.exchange, properties, fresh, **options)
        else:
            trainer = DiLoCo.from_settings(step, settings.exchange, messenger=messenger, **options)
        trainer.bind(params, opt_state)
    else:
        options = dict(gradient_dtype=model.gradient_dtype, on_compile=on_compile)
        trainer = DataParallel(
            step, params, opt_state, mesh=mesh, accumulation=accumulation, **options
        )
    rows = accumulation * _micro_batch_size(settings, mesh)
    batch = _abstract_batch(shape._replace(sequences=rows), mesh, model.config.rules)
    return Parts(
        mesh=mesh,
        model=model,
        learning_rate=optimizer.learning_rate_schedule(settings.optimizer, total_steps),
        trainer=trainer,
        control=IslandControl(trainer, properties) if settings.is_island else StepControl(),
        shape=shape,
        batch=batch,
        params=params,
        init=_init_program(settings, trainer, model, inner_optimizer),
        monitor=Monitor(
            trainer, batch, stop_on_nan=settings.nan_policy == "stop", on_compile=on_compile
        ),
        **_evaluations(
            settings, trainer, model, shape, rows // accumulation, on_compile, tokenizer
        ),
    )


def _evaluations(settings, trainer, model, shape, micro_batch_size, on_compile, tokenizer):
    """Build the evaluation of the outer parameters, and the sampler if sample_prompt is set."""
    mesh, per_position = trainer.mesh, trainer.evaluated.per_position
    options = dict(per_position=per_position, on_compile=on_compile)
    rows = shape.num_replicas * micro_batch_size
    evaluation = Evaluation(
        model,
        mesh,
        rows=rows,
        length=shape.length,
        num_sequences=max(-1, settings.evaluation.eval_steps * rows),
        token_bytes=run_model.token_bytes(settings.tokenizer, tokenizer),
        **options,
    )
    sampler = None
    prompt = settings.evaluation.sample_prompt
    if prompt:
        decoder = run_model.build_for_decoding(settings.model, mesh, model)
        if (
            tokenizer is None or settings.tokenizer.dataset_type == "synthetic"
        ):  # the rows may be too few
            tokenizer = build(vars(settings.tokenizer), settings.tokenizer.vocab_size)
        sampler = Sampler(decoder, mesh, tokenizer, prompt, **options)
    return dict(evaluation=evaluation, sampler=sampler)


def batch_shape(settings: RunSettings, mesh: Mesh) -> BatchShape:
    """Return the shape of a batch. Devices that share sequences count as one.

    Raises:
      ConfigError: the devices do not support the number of replicas or the dtype.
    """
    keys = settings.batch
    positions = mesh.shape["diloco"]
    together = mesh.size // (positions if keys.enable_diloco else 1)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu and settings.model.config.weight_dtype == jnp.bfloat16 and together > 1:
        raise ConfigError(
            f"weight_dtype=bfloat16 on {together} CPU devices that hold one replica: XLA for CPU "
            f"aborts while it compiles their sums of gradients. Use weight_dtype=float32, or one "
            f"device a replica."
        )
    if keys.enable_islands and positions > 1:
        raise ConfigError(
            f"enable_islands=true has diloco {positions} in its mesh: an island is one replica. "
            "Set dcn_diloco_parallelism=1 and dcn_fsdp_parallelism=-1, or start more islands."
        )
    sequences = keys.islands_global_batch_size
    if sequences is None:
        sequences = _micro_batch_size(settings, mesh) * keys.gradient_accumulation_steps
    num_replicas = count_replicas(keys, mesh)
    return BatchShape(num_replicas, sequences, keys.max_target_length)


def micro_batches(settings: RunSettings, mesh: Mesh) -> int:
    """Return the micro-batches of a step, the most that a global batch of islands can need."""
    if (total := settings.batch.islands_global_batch_size) is None:
        return settings.batch.gradient_accumulation_steps
    return -(-total // _micro_batch_size(settings, mesh))


def _micro_batch_size(settings: RunSettings, mesh: Mesh) -> int:
    """Return the sequences of a micro-batch of one replica."""
    devices = mesh.size // mesh.shape["diloco"] // shards_on(mesh, settings.model.config.rules)
    return settings.batch.per_device_batch_size * devices


def needs_bulk(settings: RunSettings, mesh: Mesh) -> bool:
    """Tell whether outer gradients travel between processes in bulk messages."""
    if settings.exchange is None or not joins_processes(mesh):
        return False
    return settings.exchange.resolve_on(mesh).transport == HOST


def _init_program(settings, trainer, model, inner_optimizer) -> Program:
    if settings.checkpoint.load_parameters_path:
        return trainer.init_program(lambda p: (p, inner_optimizer.init(p)), donate=(0,))
    fast = None
    if trainer.mesh.devices.flat[0].platform == "cpu":
        # The program runs once. By default LLVM compiles a small model in 10 CPU seconds. At level
        # 1 it needs 2.7 s, and 1.4 s to run. At level 0 these are 1.9 s and 7.5 s, and values are
        # rounded differently than in other programs.
        fast = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}

    def make(seed):
        params = model.init(jax.random.key(seed))
        return params, inner_optimizer.init(params)

    return trainer.init_program(make, compiler_options=fast)


def calls(settings: RunSettings, parts: Parts) -> list[Call]:
    """Return every program of a run: for steps, monitor, evaluation, samples and the first state.

    A save or a log step needs no program. checkpoint.arrays.calls has the program of a restore.
    """
    trainer = parts.trainer
    out = trainer.calls(parts.batch) + parts.monitor.calls()
    if settings.evaluation.eval_interval != -1:
        evaluations = trainer.period / settings.evaluation.eval_interval
        outer_params = trainer.evaluated.like
        out += trainer.evaluated.calls(trainer.abstract_state, evaluations)
        out += parts.evaluation.calls(outer_params, evaluations)
        out += parts.sampler.calls(outer_params, evaluations) if parts.sampler else []
    # The parameters have to be read before this program runs.
    of = (
        parts.params
        if settings.checkpoint.load_parameters_path
        else np.uint32(settings.init_weights_seed)
    )
    return [*out, Call(parts.init, (of,), 0, START)]


def _abstract_batch(shape: BatchShape, mesh: Mesh, rules: Rules) -> dict[str, Any]:
    rows = spec(("batch", "length"), rules, without=("diloco",))
    sharding = NamedSharding(mesh, P("diloco", *rows))
    rows_RBL = jax.ShapeDtypeStruct(tuple(shape), jnp.int32, sharding=sharding)
    # Replicated on all devices, so that no slice receives its rate from another slice.
    rate_R1 = jax.ShapeDtypeStruct(
        (shape.num_replicas, 1), jnp.float32, sharding=NamedSharding(mesh, P())
    )
    return {"tokens": rows_RBL, "segment_ids": rows_RBL, "learning_rate": rate_R1}


def with_learning_rate(parts: Parts, batch: dict[str, jax.Array], t: int) -> dict[str, jax.Array]:
    """Return the batch of step t with the learning rate of that step."""
    like = parts.batch["learning_rate"]
    rate = parts.control.learning_rate(parts.learning_rate, t)
    rate_R1 = np.full(like.shape, rate)
    array = jax.make_array_from_callback(like.shape, like.sharding, lambda part: rate_R1[part])
    return batch | {"learning_rate": array}
