"""A decoder as pure functions of a plain nested dict of parameters."""
# B sequences  L tokens  D model  V vocabulary  E experts

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from maxdiloco.diloco.fragments import Stacked, Vocabulary
from maxdiloco.models import devices, router
from maxdiloco.models.config import LAYERS, ModelConfig
from maxdiloco.models.decoder import Decoder
from maxdiloco.models.kernels.choice import Kernels
from maxdiloco.models.loss import head_logits, next_tokens, token_losses
from maxdiloco.models.params import Params, to_dict, with_values
from maxdiloco.models.remat import AUTO


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: a static argument of jax.jit
class Model:
    """One replica's view of a decoder.

    Attributes:
      config: sizes and choices.
      kernels: implementations to compute with. The default is plain array code.
    """

    config: ModelConfig
    kernels: Kernels = Kernels()

    def init(self, key: jax.Array) -> Params:
        """Create parameters in config.weight_dtype.

        Args:
          key: a key of jax.random. The same key gives the same values on any mesh.

        Returns:
          A nested dict of arrays.
        """
        _, state = self._create(key)
        return to_dict(state)

    @functools.cached_property
    def _structure(self) -> tuple[nnx.GraphDef, nnx.State]:
        """The decoder without values: its graph, and its parameters as ShapeDtypeStructs."""
        return jax.eval_shape(lambda: self._create(jax.random.key(0)))  # a key here would compile

    def _create(self, key: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
        """Create a decoder, as its graph and its parameters."""
        # Models that differ only in the policy share one trace: a run with remat_policy=auto builds
        # a model before it chooses the policy. The modules do not read the policy.
        config = dataclasses.replace(self.config, remat_policy=AUTO)
        return _create(config, self.kernels, key)

    def decoder(self, params: Params) -> Decoder:
        """Return the NNX module with the values of a nested dict like the result of `init`."""
        graph, state = self._structure
        return nnx.merge(graph, with_values(state, params))

    @functools.cached_property
    def shapes(self) -> Params:
        """A ShapeDtypeStruct for each parameter, in a dict like `init`'s result."""
        return to_dict(self._structure[1])

    @property
    def logical_axes(self) -> Params:
        """The logical axis names of each parameter, as tuples in a dict like `init`'s result."""
        return self._annotate(lambda names, stack: ("layers", *names) if stack else names)

    @property
    def layer_axis(self) -> Params:
        """The entry of each parameter for fragments.partition, in a dict like `init`'s result.

        For a stacked parameter the entry is the dimension of the layers, with their numbers if
        they are not all layers of the model. For other parameters it is Vocabulary(dimension) or
        None.
        """

        def axis_of(names, stack):
            if stack is None:
                return Vocabulary(names.index("vocab")) if "vocab" in names else None
            whole = len(stack.layers) == self.config.num_layers
            return 0 if whole else Stacked(0, stack.layers)

        return self._annotate(axis_of)

    def _annotate(self, entry_of) -> Params:
        """Return entry_of(logical axis names of a layer's parameter, its StackConfig or None)."""
        stacks = {stack.name: stack for stack in self.config.stacks}
        state = self._structure[1]
        return to_dict(state, lambda path, weight: entry_of(weight.names, stacks.get(path[0])))

    @property
    def gradient_dtype(self) -> DTypeLike:
        """Type in which devices sum the gradients of products."""
        return self.kernels.products.result_type or self.config.dtype

    def loss(
        self, params: Params, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Sum the token losses of one replica's batch: Algorithm 2 of Streaming DiLoCo, line 4.

        Args:
          params: nested dict.
          batch: "tokens" and "segment_ids", int32 [B, L]. Segment 0 is padding.

        Returns:
          The total, and an aux without gradient. The aux has the float32 sums "tokens" (targets
          that count) and the terms of the total, "cross_entropy" and "z_loss". With experts it also
          has router.sums and the terms of router.losses (means over the batch's tokens times the
          targets).
        """
        config, decoder = self.config, self.decoder(params)
        segment_ids_BL = batch["segment_ids"]
        rows = (batch["tokens"], *next_tokens(batch["tokens"], segment_ids_BL))
        tokens_BL, targets_BL, counts_BL = (
            devices.to_device_order(x_BL, config.rules) for x_BL in rows
        )
        segment_ids_BL = devices.unshard_length(segment_ids_BL, config.rules)
        x_BLD, used = self._hidden_states(decoder, tokens_BL, segment_ids_BL)
        total, (cross_entropy, z_loss) = token_losses(
            config, self.kernels, x_BLD, decoder.head_weight(), targets_BL, counts_BL
        )
        tokens = jnp.sum(counts_BL, dtype=jnp.float32)
        aux = {"tokens": tokens, "cross_entropy": cross_entropy, "z_loss": z_loss}
        if used is not None:
            terms = {name: mean * tokens for name, mean in router.losses(config, used).items()}
            total += sum(terms.values())
            aux |= terms | router.sums(config, used)
        return total, jax.lax.stop_gradient(aux)

    def logits(self, params: Params, tokens_BL: jax.Array, segment_ids_BL: jax.Array) -> jax.Array:
        """Compute the logits of every position.

        Args:
          params: nested dict.
          tokens_BL: int32.
          segment_ids_BL: int32; equal ids see each other and are adjacent.

        Returns:
          Float32 [B, L, V], -inf for the rows of padding of the vocabulary.
        """
        decoder = self.decoder(params)
        x_BLD, _ = self._hidden_states(decoder, tokens_BL, segment_ids_BL)
        w = decoder.head_weight().astype(x_BLD.dtype)
        return head_logits(self.config, self.kernels, x_BLD, w)

    def _hidden_states(self, decoder, tokens_BL, segment_ids_BL):
        """Return the hidden states after the final norm, [B, L, D], and the use of experts."""
        config, kernels = self.config, self.kernels

        def attend(kind, _, q_BLNH, k_BLKH, v_BLKH, sinks_N):
            arrays = q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N
            return kernels.attend(config, kind.window, *arrays), None

        x_BLD, _, used = decoder(
            tokens_BL,
            devices.local_positions(tokens_BL.shape[1], config.rules)[None],
            attend,
            real_BL=devices.to_device_order(segment_ids_BL != 0, config.rules),
            policy=config.remat_policy,
            unrolled=kernels.unroll_layers,
        )
        return decoder.final_norm(x_BLD), used

    def rebalance(self, params: Params, counts_lE: jax.Array) -> Params:
        """Move the routed biases towards an even load (arXiv 2412.19437, section 2.1.2).

        A bias rises if an expert had fewer tokens than the mean, and falls if it had more.

        Args:
          params: nested dict.
          counts_lE: choices of each expert in the step, over the whole batch of the replica.

        Returns:
          The parameters with the biases of the next step.
        """
        stack, rate = params[LAYERS], self.config.routed_bias_update_rate
        bias_lE = stack["moe"]["routed_bias"]
        mean_l1 = jnp.mean(counts_lE, axis=-1, keepdims=True)
        bias_lE = bias_lE + rate * jnp.sign(mean_l1 - counts_lE).astype(bias_lE.dtype)
        return params | {LAYERS: stack | {"moe": stack["moe"] | {"routed_bias": bias_lE}}}


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced once for equal models
def _create(
    config: ModelConfig, kernels: Kernels, key: jax.Array
) -> tuple[nnx.GraphDef, nnx.State]:
    """Create a decoder with new values, see Model.init."""
    key_ends, key_layers = jax.random.split(key)
    decoder = Decoder(config, kernels, rngs=nnx.Rngs(params=key_ends, layers=key_layers))
    return nnx.split(decoder, nnx.Param)


def count_parameters(model: Model) -> int:
    """Return the number of parameters of a model; nothing is allocated."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.shapes))
