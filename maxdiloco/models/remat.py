"""Rematerialisation: what a layer keeps for its backward pass; the rest is computed again."""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

QKV = "qkv"  # the matmuls to queries, keys and values; norm and rotation are cheap to redo
CONTEXT = "context"  # the output of attention, and what its backward pass needs
ATTENTION_OUT = "attention_out"  # the attention block's output matmul
NORM_FACTOR = "norm_factor"  # one number a row; forming it again reads the whole row
MLP_IN = "mlp_in"  # the matmuls before the MLP's activation
ROUTED = "routed"  # what sorts a token's choices by expert: a few integers a token
ROUNDED = "rounded"  # the activations of a product in 8 bits; without quantization there are none

AUTO = "auto"  # chosen by trainer.remat_choice; a model that no step trains takes it as `full`
# Policy -> names kept, from the one that computes least twice to the one that needs least memory.
# The layer's input and ROUTED are kept by all of them; `none` keeps everything.
POLICIES: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "minimal": (QKV, NORM_FACTOR, CONTEXT, ATTENTION_OUT, MLP_IN, ROUTED, ROUNDED),
    "save_qkv_context": (QKV, NORM_FACTOR, CONTEXT, ROUTED),
    "save_context": (CONTEXT, ROUTED),
    "full": (ROUTED,),
}


def keep(x: jax.Array, name: str) -> jax.Array:
    """Mark x as a value that policies may keep under `name`."""
    return checkpoint_name(x, name)


def checkpointed(layer_fn: Callable, policy: str, *, in_loop: bool = True) -> Callable:
    """layer_fn with the named policy for its backward pass.

    policy: AUTO or a key of POLICIES. in_loop: it runs inside a scan of several iterations, which
    keeps the two passes apart.
    """
    names = POLICIES["full" if policy == AUTO else policy]
    if names is None:
        return layer_fn
    return jax.checkpoint(
        layer_fn,
        policy=jax.checkpoint_policies.save_only_these_names(*names),
        prevent_cse=not in_loop,
    )
