"""The token embedding."""
# B sequences  L tokens  D model  V vocabulary

import jax
from flax import nnx

from maxdiloco.models.config import ModelConfig
from maxdiloco.models.kernels.token_lookup import NAMES, look_up
from maxdiloco.models.linear import matrix


class Embedding(nnx.Module):
    """A row of a table for each token, times `config.embedding_multiplier`.

    Attributes:
      table: [V, D].
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Create the table.

        A table that is tied to the head has variance 1 / D, and its rows are scaled by sqrt(D)
        (arXiv 1706.03762, section 3.4). Otherwise the table has variance 1.

        Args:
          config: the model.
          rngs: draws from the stream `params`.
        """
        self.config = config
        scaled = config.tied_head or config.embedding_multiplier != 1
        self.table = matrix(
            (config.padded_vocab_size, config.emb_dim),
            NAMES,
            fan_in=config.emb_dim if scaled else 1,
            dtype=config.weight_dtype,
            rngs=rngs,
        )

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        """Look up tokens.

        Args:
          tokens_BL: int32.

        Returns:
          [B, L, D] in config.dtype; NaN for a token outside the table.
        """
        return look_up(self.config, self.table[...], tokens_BL)
