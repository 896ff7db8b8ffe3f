"""cuDNN's attention as the installed JAX lowers it for a GPU that need not be there."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from maxdiloco.models import attention, cudnn
from maxdiloco.models.spec import GROUPED_DOCUMENTS

SPEC = tiny_model.build().spec
MASK, OFFSETS = ("ScaleBiasSoftmax", "CAUSAL"), ("Softmax", "PADDING_CAUSAL")


@pytest.mark.parametrize(
    ("window", "by_offsets", "kinds"),
    [(0, True, {MASK, OFFSETS}), (0, False, {MASK}), (100, True, {MASK})],
)
def test_jax_takes_the_operands_of_its_primitives(window, by_offsets, kinds):
    """Which are private to it. A forward and a backward kernel of each kind; a mask is a bias."""
    kernel = functools.partial(attention.cudnn, SPEC, window, by_offsets=by_offsets)
    dims = {(2, 1024, 4, 64): jnp.bfloat16, (2, 1024, 2, 64): jnp.bfloat16, (2, 1024): jnp.int32}
    q, k, segments = (jax.ShapeDtypeStruct(*one) for one in dims.items())
    gradient = jax.grad(lambda *arrays: kernel(*arrays).astype(jnp.float32).sum(), (0, 1, 2))
    lowered = jax.jit(gradient).trace(q, k, k, segments).lower(lowering_platforms=("cuda",))
    found = re.findall(r"@__cudnn\$fmha(\w+)\(.*?mask_type\W+22: \W+22(\w+?)\\", lowered.as_text())
    assert sorted(found) == sorted(
        (name + way, mask) for name, mask in kinds for way in ("", "Backward")
    )


def test_offsets_that_jax_cannot_count_are_not_given(monkeypatch):
    """As many queries as there may be, and one sequence more."""
    used = []

    def bound(choice, qkv, kept=(), *, mask=None, found=None):
        used.append("offsets" if found is not None else "mask")
        B, L, N, _ = qkv[0].shape
        rows = B * (1 if found is None else found.lengths_BM.shape[1])
        return [qkv[0], jnp.zeros((rows, N, L), jnp.float32)]

    monkeypatch.setattr(cudnn, "bound", bound)
    for sequences, kinds in ((15, {"offsets", "mask"}), (16, {"mask"})):
        used.clear()
        q = jax.ShapeDtypeStruct((sequences, 2**15, 32, 128), jnp.bfloat16)
        segments = jax.ShapeDtypeStruct((sequences, 2**15), jnp.int32)
        kernel = functools.partial(attention.cudnn, SPEC, 0, by_offsets=True)
        jax.eval_shape(kernel, q, q, q, segments)
        assert set(used) == kinds


@pytest.mark.parametrize(("length", "room"), [(128, 8), (2048, 16), (8192, 64), (32768, 64)])
def test_room_for_documents_follows_the_window_within_bounds(length, room):
    _, (lengths_BM, offsets_BM) = cudnn.documents(np.ones((1, length), np.int32))
    assert (lengths_BM.shape, offsets_BM.shape) == ((1, room), (1, room + 1))


@pytest.mark.parametrize("K", [4, pytest.param(2, marks=pytest.mark.skipif(
    jax.__version_info__ < GROUPED_DOCUMENTS, reason="wrong in JAX 0.10, so never asked for"
))])  # fmt: skip
def test_jax_counts_the_offsets_of_keys_by_the_keys_heads(K):
    """Two windows of 64 tokens, documents from 0 and 40, and from 0: numbers of features before."""
    from jax._src.cudnn.fused_attention_stablehlo import _fix_seqlen_offsets

    segments = np.stack([np.arange(64) >= 40, np.zeros(64, bool)]).astype(np.int32)
    _, (lengths, offsets) = cudnn.documents(segments)
    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 8), jnp.bfloat16) for heads in (4, K))
    *_, of_queries, of_keys = _fix_seqlen_offsets(lengths, lengths, offsets, offsets, q, k)
    for found, heads in ((of_queries, 4), (of_keys, K)):
        assert found.reshape(-1)[:4].tolist() == [x * heads * 8 for x in (0, 40, 64, 128)]
