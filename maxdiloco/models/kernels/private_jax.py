"""The private parts of JAX that this package calls, checked with the versions in CHECKED.

Only cuDNN's attention needs one. `jax.nn.dot_product_attention` accepts documents only as a mask,
which the kernels read for each head. It does not name the values that a backward pass needs, so a
remat policy runs the forward kernel again. The primitives that it binds accept offsets and return
these values. If a version of JAX lacks them, choice.py selects `cudnn_public`, which calls the
function of jax.nn.
"""
# B sequences  L tokens  N query heads  K key/value heads  H head dim  M documents of a window

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

CHECKED = ("0.10.2", "0.12.0.1")  # the versions of requirements.lock
PRIMITIVES = ("_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p")


def cudnn_module() -> ModuleType | None:
    """Return JAX's module of cuDNN's attention, or None if it lacks a function used here."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module
    except ImportError:
        return None
    names = (*PRIMITIVES, "MaskType", "AttentionLayout", "get_large_negative_number")
    return module if all(hasattr(module, name) for name in names) else None


def cudnn_attention(
    scale: float,
    qkv: Sequence[jax.Array],
    residuals: Sequence[jax.Array] = (),
    *,
    mask: jax.Array | None = None,
    documents: Any = None,
) -> list[jax.Array]:
    """Bind the primitive of cuDNN's forward or backward kernel, causal.

    The primitive that jax.nn binds, which calls this one, would form document offsets in every
    call.

    Args:
      scale: factor on the products q k.
      qkv: queries [B, L, N, H], keys and values [B, L, K, H].
      residuals: empty for the forward kernel; for the backward kernel log normalisers, context and
        the context's gradient.
      mask: bool [B, 1, L, L], or None.
      documents: cudnn.Documents, or None.

    Returns:
      The context and the log normalisers, or the gradients of queries, keys and values. Normalisers
      are [B, N, L], or [B M, N, L] with M documents of a window.
    """
    module = cudnn_module()
    zero = jnp.zeros((), qkv[0].dtype)
    absent = jnp.zeros(0, zero.dtype)
    bias, offsets, mask_type = absent, [absent] * 4, module.MaskType.CAUSAL
    if documents is not None:
        mask_type = module.MaskType.PADDING_CAUSAL
        offsets = [documents.lengths_BM] * 2 + [
            documents.query_offsets_BM,
            documents.key_offsets_BM,
        ]
    if mask is not None:
        bias = jnp.where(mask, zero, module.get_large_negative_number(zero.dtype))
    options = {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (mask is not None, False),  # a bias, without a gradient
        "mask_type": mask_type,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    if jax.__version_info__ >= (0, 12):
        options |= {"score_mod_name": None, "score_mod_jaxpr": None}
    operands = (*qkv, bias, *offsets, absent, absent, *residuals)
    forward, backward = (getattr(module, name) for name in PRIMITIVES)
    if residuals:
        return backward.bind(*operands, **options)
    return forward.bind(*operands, is_training=True, **options)
