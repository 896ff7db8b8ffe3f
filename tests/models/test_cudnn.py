"""cuDNN's attention as the installed JAX lowers it for a GPU that need not be there."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiloco.models.kernels import cudnn, private_jax
from maxdiloco.models.kernels.blockwise import Scores

MASK, WHOLE = ("ScaleBiasSoftmax", "CAUSAL"), ("Softmax", "CAUSAL")
OFFSETS = ("Softmax", "PADDING_CAUSAL")


@pytest.mark.parametrize(
    ("window", "by_offsets", "kinds"),
    [
        (0, True, [MASK, WHOLE, *[OFFSETS] * 2]),  # 1024 tokens have three rooms
        (0, False, [MASK]),
        (100, True, [MASK]),
    ],
)
def test_jax_takes_the_operands_of_its_primitives(window, by_offsets, kinds):
    """Which are private to it. A forward and a backward kernel for a mask, which is a bias, and for
    each room for documents."""
    kernel = functools.partial(cudnn.attention, Scores(8.0, window=window), by_offsets=by_offsets)
    dims = {(2, 1024, 4, 64): jnp.bfloat16, (2, 1024, 2, 64): jnp.bfloat16, (2, 1024): jnp.int32}
    q, k, segments = (jax.ShapeDtypeStruct(*one) for one in dims.items())
    gradient = jax.grad(lambda *arrays: kernel(*arrays).astype(jnp.float32).sum(), (0, 1, 2))
    lowered = jax.jit(gradient).trace(q, k, k, segments).lower(lowering_platforms=("cuda",))
    found = re.findall(r"@__cudnn\$fmha(\w+)\(.*?mask_type\W+22: \W+22(\w+?)\\", lowered.as_text())
    assert sorted(found) == sorted(
        (name + way, mask) for name, mask in kinds for way in ("", "Backward")
    )


def test_the_installed_jax_was_checked():
    """Whoever raises the version runs this file and names the version there."""
    assert private_jax.cudnn_module() is not None
    assert jax.__version__ in private_jax.CHECKED


def test_offsets_that_jax_cannot_count_are_not_given(monkeypatch):
    """As many queries as there may be, and one sequence more."""
    used = []

    def bound(scale, qkv, kept=(), *, mask=None, documents=None):
        used.append("mask" if documents is None and mask is not None else "offsets")
        B, L, N, _ = qkv[0].shape
        rows = B if documents is None else documents.lengths_BM.size
        return [qkv[0], jnp.zeros((rows, N, L), jnp.float32)]

    monkeypatch.setattr(cudnn, "cudnn_attention", bound)
    for sequences, kinds in ((15, {"offsets", "mask"}), (16, {"mask"})):
        used.clear()
        q = jax.ShapeDtypeStruct((sequences, 2**15, 32, 128), jnp.bfloat16)
        segments = jax.ShapeDtypeStruct((sequences, 2**15), jnp.int32)
        kernel = functools.partial(cudnn.attention, Scores(11.0), by_offsets=True)
        jax.eval_shape(kernel, q, q, q, segments)
        assert set(used) == kinds


@pytest.mark.parametrize(
    ("length", "found"), [(128, [4]), (2048, [4, 8, 32]), (8192, [16, 32, 64]), (65536, [64])]
)
def test_room_for_documents_follows_the_window_within_bounds(length, found):
    assert cudnn.document_capacities(length) == [1, *found]


@pytest.mark.parametrize("K", [4, 2])
def test_documents_lie_as_jax_hands_them_to_cudnn(K):
    """Two windows of 64 tokens, documents from 0 and 40, and from 0. JAX 0.10 counts those of keys
    by the queries' heads (jax-ml/jax pull request 39521), so theirs are by hand."""
    from jax._src.cudnn.fused_attention_stablehlo import _fix_seqlen_offsets

    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 8), jnp.bfloat16) for heads in (4, K))
    first = np.zeros((2, 64), bool)
    first[[0, 0, 1], [0, 40, 0]] = True
    found = cudnn.documents(first, 3, q, k)
    assert found.lengths_BM.tolist() == [[40, 24, 64], [0, 0, 0]]
    for offsets, heads in ((found.query_offsets_BM, 4), (found.key_offsets_BM, K)):
        assert (offsets // (8 * heads)).tolist() == [[0, 40, 64, 128], [128] * 4]
    numbers, places = found.token_documents
    assert numbers[:, [0, 39, 40, 63]].tolist() == [[0, 0, 1, 1], [2, 2, 2, 2]]
    assert places[:, [0, 39, 40, 63]].tolist() == [[0, 39, 0, 23], [0, 39, 40, 63]]
    lengths = jnp.array([[40, 24, -1], [64, -1, -1]])
    offsets = jnp.array([[0, 40, -1, -1], [0, -1, -1, -1]])
    of_jax = _fix_seqlen_offsets(lengths, lengths, offsets, offsets, q, k)
    assert found.lengths_BM.tolist() == of_jax[0].tolist()
    assert found.query_offsets_BM.tolist() == of_jax[2].tolist()
