"""The feed-forward layer, plain or gated."""
# B sequences  L tokens  D model  F hidden

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiloco.models.config import ModelConfig
from maxdiloco.models.kernels.choice import Kernels
from maxdiloco.models.linear import Linear, add_bias
from maxdiloco.models.remat import MLP_IN, keep
from maxdiloco.parallel.sharding import constrain

ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "linear": lambda x: x,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # arXiv 1606.08415, section 2
    "plus_one": lambda x: x + 1,
}


def activate(
    names: tuple[str, ...], limit: float, up: jax.Array, gate: jax.Array | None = None
) -> jax.Array:
    """Compute the hidden values f(up), or f(gate) * g(up) of a gated layer (arXiv 2002.05202).

    Args:
      names: (f,) or (f, g), keys of ACTIVATIONS.
      limit: `up` is clipped to [-limit, limit] and `gate` to at most the limit (gpt-oss). 0 is off.
      up: [..., F].
      gate: [..., F], or None without a gate.

    Returns:
      [..., F].
    """
    hidden = ACTIVATIONS[names[-1]](jnp.clip(up, -limit, limit) if limit else up)
    if gate is None:
        return hidden
    return ACTIVATIONS[names[0]](jnp.minimum(gate, limit) if limit else gate) * hidden


def activation(config: ModelConfig, kernels: Kernels) -> Callable:
    """Return the function (up) or (up, gate) -> hidden values of a model, all [..., F]."""
    names, limit = config.mlp_activations, config.mlp_activations_limit
    return kernels.elementwise(functools.partial(activate, names, limit))


class MLP(nnx.Module):
    """Feed-forward layer: f(x w_up) w_out, or f(x w_gate) * g(x w_up) w_out.

    Attributes:
      w_gate: [D] -> [F], or None without a gate.
      w_up: [D] -> [F].
      w_out: [F] -> [D].
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, width: int, *, rngs: nnx.Rngs):
        """Create the projections.

        Args:
          config: the model.
          kernels: products and the activation function.
          width: F.
          rngs: draws from the stream `params`.
        """
        self.rules = config.rules
        self.activation = activation(config, kernels)
        D, F = config.emb_dim, width
        gated = len(config.mlp_activations) == 2
        linear = functools.partial(Linear, config, kernels, use_bias=config.mlp_bias, rngs=rngs)
        self.w_gate = linear((D,), (F,), ("embed", "mlp")) if gated else None
        self.w_up = linear((D,), (F,), ("embed", "mlp"))
        self.w_out = linear((F,), (D,), ("mlp", "embed"), gain=config.residual_gain)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Transform each token.

        Args:
          x_BLD: the normed residual stream.

        Returns:
          The term for the residual stream [B, L, D].
        """
        inputs = [self._hidden(self.w_up, x_BLD)]
        if self.w_gate is not None:
            inputs.append(self._hidden(self.w_gate, x_BLD))
        return self.w_out(self.activation(*inputs))

    def _hidden(self, linear, x_BLD):
        x_BLF = linear.product(x_BLD)
        x_BLF = constrain(x_BLF, ("batch", "length", "mlp_act"), self.rules)
        return add_bias(keep(x_BLF, MLP_IN), linear.bias)
