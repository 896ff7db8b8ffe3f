"""Array code in the place of JAX's primitives of cuDNN's attention, which needs a GPU."""
# Letters as in models/kernels/cudnn.py; D rows of log normalisers, one for each document with room

import jax
import jax.numpy as jnp
import numpy as np


def bound(scale, qkv, kept=(), *, mask=None, documents=None):
    """Like private_jax.cudnn_attention."""
    found = documents
    (q_BLNH, k_BLKH, v_BLKH), (B, L, K, H) = qkv, qkv[1].shape
    see_BLL = np.ones((B, L, L), bool) if mask is None else mask[:, 0]
    if found is not None:
        see_BLL = seen_by_documents(found, q_BLNH)
    see_BLL &= np.tril(np.ones((L, L), bool))
    share = q_BLNH.shape[2] // K
    k_BLNH, v_BLNH = (jnp.repeat(x, share, axis=2) for x in (k_BLKH, v_BLKH))
    logits_BNLS = scale * jnp.einsum("blnh,bsnh->bnls", q_BLNH, k_BLNH)
    logits_BNLS = jnp.where(see_BLL[:, None], logits_BNLS, -jnp.inf)
    if not kept:
        lse_BNL = jax.nn.logsumexp(logits_BNLS, axis=-1)
        weights_BNLS = jnp.exp(logits_BNLS - lse_BNL[..., None])
        context_BLNH = jnp.einsum("bnls,bsnh->blnh", weights_BNLS, v_BLNH)
        return [context_BLNH, lse_BNL if found is None else by_document(lse_BNL, found)]
    lse, context_BLNH, d_BLNH = kept
    assert len(lse) == (B if found is None else found.lengths_BM.size)
    lse_BNL = lse if found is None else by_token(lse, found)
    weights_BNLS = jnp.exp(logits_BNLS - lse_BNL[..., None])
    d_BNLS = jnp.einsum("blnh,bsnh->bnls", d_BLNH, v_BLNH)
    d_BNLS -= jnp.sum(d_BLNH * context_BLNH, axis=-1).swapaxes(1, 2)[..., None]
    d_BNLS = scale * weights_BNLS * d_BNLS
    of_keys = (
        jnp.einsum("bnls,blnh->bsnh", *pair).reshape(B, L, K, share, H).sum(3)
        for pair in ((d_BNLS, q_BLNH), (weights_BNLS, d_BLNH))
    )
    return [jnp.einsum("bnls,bsnh->blnh", d_BNLS, k_BLNH), *of_keys]


def seen_by_documents(found, q_BLNH):
    """Which tokens are of one document, bool [B, L, L]; none where they do not fill it."""
    B, L, N, H = q_BLNH.shape
    starts = found.query_offsets_BM.ravel() // (N * H)
    number_BL = jnp.sum(starts <= jnp.arange(B * L)[:, None], axis=1).reshape(B, L)
    is_whole = jnp.sum(found.lengths_BM) == B * L
    return (number_BL[:, :, None] == number_BL[:, None]) & is_whole


def places(found):
    """Of each token of all windows in a row of each document: the row, and where in it."""
    lengths = found.lengths_BM.ravel()
    ends = jnp.cumsum(lengths)
    tokens = jnp.arange(found.token_documents[0].size)
    row = jnp.searchsorted(ends, tokens, side="right")
    return row, tokens - (ends - lengths)[row]


def by_document(x_BNL, found):
    """[B, N, L] as [documents, N, L] from each one's start on, and 7 in what nobody fills."""
    B, N, L = x_BNL.shape
    row, column = places(found)
    out = jnp.full((found.lengths_BM.size, L, N), 7.0)
    return out.at[row, column].set(x_BNL.swapaxes(1, 2).reshape(B * L, N)).swapaxes(1, 2)


def by_token(x_DNL, found):
    """The inverse of by_document."""
    D, N, L = x_DNL.shape
    row, column = places(found)
    return x_DNL.swapaxes(1, 2)[row, column].reshape(-1, L, N).swapaxes(1, 2)
