"""Rematerialisation: which values a layer keeps for its backward pass; the rest is recomputed."""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

QKV = "qkv"  # projections to queries, keys and values; norm and rotation are cheap to redo
CONTEXT = "context"  # the output of attention, and the residuals of its backward pass
ATTENTION_OUT = "attention_out"  # the output projection of attention
NORM_FACTOR = "norm_factor"  # one number a row; to recompute it reads the whole row
MLP_IN = "mlp_in"  # the projections before the activation function
ROUTED = "routed"  # the order of a token's choices by expert: a few integers a token
ROUNDED = "rounded"  # 8-bit activations of a product; without quantization there are none

AUTO = "auto"  # run.remat_choice replaces it; in a model that is not trained it means `full`
# Policy -> names kept, from the least recomputation to the least memory.
# The layer's input and ROUTED are kept by all of them; `none` keeps everything.
POLICIES: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "minimal": (QKV, NORM_FACTOR, CONTEXT, ATTENTION_OUT, MLP_IN, ROUTED, ROUNDED),
    "save_qkv_context": (QKV, NORM_FACTOR, CONTEXT, ROUTED),
    "save_context": (CONTEXT, ROUTED),
    "full": (ROUTED,),
}


def keep(x: jax.Array, name: str) -> jax.Array:
    """Mark x as a value that policies may keep under a name."""
    return checkpoint_name(x, name)


def apply_remat_policy(layer_fn: Callable, policy: str, *, in_loop: bool = True) -> Callable:
    """Apply a policy to the backward pass of a layer.

    Args:
      layer_fn: the layer.
      policy: AUTO or a key of POLICIES.
      in_loop: whether the layer runs inside a scan of several iterations, which keeps the two
        passes apart.

    Returns:
      A function like layer_fn.
    """
    names = POLICIES["full" if policy == AUTO else policy]
    if names is None:
        return layer_fn
    return jax.checkpoint(
        layer_fn,
        policy=jax.checkpoint_policies.save_only_these_names(*names),
        prevent_cse=not in_loop,
    )
