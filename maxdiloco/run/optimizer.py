"""The inner optimizer: its rule, its learning rate, and the parameters that decay.

The learning rate is an argument of the compiled step, so no program depends on the schedule.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from optax.contrib import MuonDimensionNumbers

from maxdiloco.models.model import Model
from maxdiloco.parallel import offload
from maxdiloco.parallel.sharding import is_vector, optimizer_shardings
from maxdiloco.run.settings import OptimizerSettings

MUON_RMS = 0.2  # an update as large as AdamW's, so that both take one rate (arXiv 2502.16982, 2.2)
OUTPUT_NAMES = ("heads", "kv_heads", "head_dim", "mlp")


def learning_rate_schedule(settings: OptimizerSettings, total_steps: int) -> Callable[[int], float]:
    """Return a function from the number of steps before an inner step to its learning rate.

    The rate is rounded to float32. It rises linearly from 0 to the peak at the last warmup step.
    With lr_schedule_type=cosine it then follows half a cosine to the final fraction at the last
    step of the schedule (arXiv 2503.09799, section 3). With wsd it stays at the peak, and falls to
    the final fraction in the last part of the schedule (arXiv 2404.06395). It is constant after the
    schedule.

    Args:
      settings: settings of the optimizer.
      total_steps: length of the schedule [inner steps] if the settings leave it open.
    """
    length = schedule_steps(settings, total_steps)
    warmup = round(settings.warmup_steps_fraction * length)
    falls_after, style = warmup, "cosine"
    if settings.lr_schedule_type == "wsd":
        falls_after = max(warmup, length - round(settings.wsd_decay_steps_fraction * length))
        style = settings.wsd_decay_style
    left = {"cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)), "linear": lambda x: 1 - x}[style]
    last = settings.learning_rate_final_fraction

    def schedule(count: int) -> float:
        t = count + 1
        if t < warmup:
            return float(np.float32(settings.learning_rate * t / warmup))
        progress = min(max(t - falls_after, 0) / max(length - falls_after, 1), 1.0)
        return float(np.float32(settings.learning_rate * (last + (1 - last) * left(progress))))

    return schedule


def schedule_steps(settings: OptimizerSettings, total_steps: int) -> int:
    """Return the length of the learning-rate schedule [inner steps]."""
    given = settings.learning_rate_schedule_steps
    return total_steps if given == -1 else given


def build(settings: OptimizerSettings, *, model: Model) -> optax.GradientTransformationExtraArgs:
    """Build the optimizer: clipping by global norm (0: none), then the rule of opt_type.

    The update has the step's learning_rate as an argument. The rules are:

    * adamw: Adam with decoupled weight decay, times the learning rate, on matrices and embeddings.
      Norm scales do not decay.
    * muon: orthogonalised Nesterov momentum for the layers' matrices, Adam for the rest, and the
      same decay (arXiv 2502.16982).
    * sgd: plain, without momentum and decay.

    The state is float32 also for bfloat16 parameters, since a bfloat16 mean of squares would not
    change. The mean of gradients has the type mu_dtype.
    """
    mu = settings.mu_dtype
    adam = optax.scale_by_adam(
        b1=settings.adam_b1, b2=settings.adam_b2, eps=settings.adam_eps, mu_dtype=mu
    )
    decay = optax.add_decayed_weights(settings.adam_weight_decay, mask=decays(model))
    rules = {
        "adamw": lambda: (adam, decay),
        "muon": lambda: (_muon(adam, settings, model), decay),
        "sgd": lambda: (),
    }
    clipping = ()
    if settings.gradient_clipping_threshold:
        clipping = (optax.clip_by_global_norm(settings.gradient_clipping_threshold),)

    def scale(updates, state, params=None, *, learning_rate, **_):
        return jax.tree.map(lambda x: -learning_rate * x, updates), state

    by_rate = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scale)
    rule = optax.chain(*clipping, *rules[settings.opt_type](), by_rate)

    def init(params):
        return rule.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))

    return optax.GradientTransformationExtraArgs(init, rule.update)


def abstract_state(
    settings: OptimizerSettings, rule: optax.GradientTransformation, params: Any, mesh: Mesh
) -> Any:
    """Return one replica's state as ShapeDtypeStructs, sharded like `params`, also such structs."""
    shardings = jax.tree.map(lambda x: x.sharding, params)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(rule.init, params),
        optimizer_shardings(rule, params, shardings, mesh),
    )
    if not settings.optimizer_memory_host_offload:
        return state
    # A scalar stays on the device.
    return jax.tree.map(lambda x: offload.move_to_memory(x, offload.HOST) if x.shape else x, state)


def decays(model: Model) -> Any:
    """Return a pytree like the parameters: True for leaves with weight decay.

    Norms, biases and attention sinks do not decay.
    """
    return _by_names(lambda names: not is_vector(names), model)


def muon_dims(model: Model) -> Any:
    """Return a pytree like the parameters: muon's matrix dims of each leaf, or None for Adam.

    All heads form one matrix, and each expert has its own.
    """

    def dims(names):
        if "layers" not in names or is_vector(names) or "router" in names:
            return None
        read = "embed" if "embed" in names else "lora"  # neither heads nor experts
        outer = tuple(dim for dim, name in enumerate(names) if name == read)
        inner = tuple(
            dim
            for dim, name in enumerate(names)
            if name in OUTPUT_NAMES or (name == "lora" and read == "embed")
        )
        reads = outer[0] < inner[0]  # from the residual stream, rather than to it
        return MuonDimensionNumbers(*((outer, inner) if reads else (inner, outer)))

    return _by_names(dims, model)


def _muon(adam, settings, model):
    dims = muon_dims(model)
    is_dims = lambda x: x is None or isinstance(x, MuonDimensionNumbers)  # noqa: E731
    labels = jax.tree.map(lambda d: "muon" if d else "adam", dims, is_leaf=is_dims)
    matrices = jax.tree.map(lambda d: d or optax.MaskedNode(), dims, is_leaf=is_dims)
    muon = optax.chain(
        optax.contrib.scale_by_muon(
            beta=settings.muon_beta, mu_dtype=settings.mu_dtype, weight_dimension_numbers=matrices
        ),
        optax.stateless(lambda updates, _: jax.tree.map(_with_adams_rms, updates, matrices)),
    )
    return optax.partition({"muon": muon, "adam": adam}, labels)


def _with_adams_rms(update, dims):
    """Scale an orthogonal update by MUON_RMS * sqrt(larger side of the matrix)."""
    both = dims.reduction_axis, dims.output_axis
    sides = (math.prod(update.shape[axis] for axis in axes) for axes in both)
    return update * (MUON_RMS * math.sqrt(max(sides)))


def _by_names(fn, model):
    return jax.tree.map(fn, model.logical_axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
