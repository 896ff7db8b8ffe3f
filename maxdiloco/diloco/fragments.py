"""Partition of the parameters into fragments; a fragment is exchanged as a whole.

Streaming DiLoCo (arXiv 2501.18512) sec. 2.2: fragments are sets of whole layers, strided by
default, contiguous on request. Parameters outside the layers (embeddings, head, last norm) form
separate fragments, so layer fragments contain only layers.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from maxdiloco.diloco.slices import LeafSlice, slice_along


class Stacked(NamedTuple):
    """A leaf that stacks layers along dim `axis`; entry i is layer `layers[i]`."""

    axis: int
    layers: tuple[int, ...]


class Vocabulary(NamedTuple):
    """A leaf outside the layers whose dim `axis` is the vocabulary; its rows may be split."""

    axis: int


_ENTRIES = Stacked | Vocabulary | int | None  # allowed entries of layer_axis


class Fragment(NamedTuple):
    """A fragment: its slices in tree order of the leaves, its layers, and its number of values."""

    slices: tuple[LeafSlice, ...]
    layers: tuple[int, ...]
    size: int


def partition(
    params: Any,
    layer_axis: Any,
    *,
    num_fragments: int,
    num_nonlayer: int = 1,
    sequential: bool = False,
) -> tuple[Fragment, ...]:
    """Put every value of `params` into exactly one fragment.

    Args:
      params: one replica's pytree of arrays or ShapeDtypeStructs.
      layer_axis: None (no leaf is stacked), or a pytree like params with None, int, Stacked or
        Vocabulary for each leaf. An int is the axis of layers: entry i is layer i.
      num_fragments: number of fragments, P.
      num_nonlayer: number k of fragments for parameters outside the layers. With k > 1, row v of a
        Vocabulary leaf belongs to fragment v mod k; the other leaves without layers to fragment 0.
      sequential: whether a fragment's layers are contiguous instead of strided.

    Raises:
      ValueError: `layer_axis` does not match `params`, or the counts leave a fragment empty.
    """
    leaves = jax.tree.leaves(params)
    leaf_axes = leaf_axes_of(params, layer_axis)
    stacked = [kind for kind in leaf_axes if isinstance(kind, Stacked)]
    num_layers = max((max(kind.layers) + 1 for kind in stacked), default=0)
    if num_fragments == 1:
        contents = [([LeafSlice(i, "whole") for i in range(len(leaves))], tuple(range(num_layers)))]
    elif stacked:
        contents = _by_layer(leaves, leaf_axes, num_layers, num_fragments, num_nonlayer, sequential)
    else:
        contents = _by_leaf(leaves, num_fragments, sequential)
    found = []
    for p, (leaf_slices, layers) in enumerate(contents):
        if not leaf_slices:
            raise ValueError(
                f"num_fragments={num_fragments} leaves fragment {p} empty: no leaf "
                f"holds a layer of it. Use fewer fragments."
            )
        size = sum(math.prod(s.shape(leaves[s.leaf].shape)) for s in leaf_slices)
        found.append(Fragment(tuple(leaf_slices), layers, size))
    return tuple(found)


def leaf_axes_of(params: Any, layer_axis: Any) -> list[Any]:
    """Return None, Stacked or Vocabulary for each leaf; arguments and errors as in `partition`."""
    if layer_axis is None:
        return [None] * len(jax.tree.leaves(params))
    leaves, leaf_axes = _by_path(params, type(None)), _by_path(layer_axis, _ENTRIES)
    for name in [*leaves, *leaf_axes]:
        if name not in leaves or name not in leaf_axes:
            has, lacks = ("params", "layer_axis") if name in leaves else ("layer_axis", "params")
            raise ValueError(
                f"{lacks}{name} is missing, which {has} has. Give layer_axis the structure of "
                "params, with None, an axis, Stacked or Vocabulary for each leaf."
            )
    # A None in params is not a leaf, so its entry in layer_axis is ignored.
    return [_checked(leaf_axes[name], x.shape) for name, x in leaves.items() if x is not None]


def _by_path(tree, entries) -> dict[str, Any]:
    """Return {path: leaf}; values of the types `entries` count as leaves."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, entries))
    return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def _checked(kind, shape):
    if not isinstance(kind, _ENTRIES) or isinstance(kind, bool):
        raise ValueError(
            f"layer_axis has {kind!r} for a leaf of shape {shape}. Give None, an axis, Stacked or "
            "Vocabulary."
        )
    if kind is None:
        return None
    if isinstance(kind, int):
        kind = Stacked(kind, tuple(range(shape[kind])) if -len(shape) <= kind < len(shape) else ())
    if not -len(shape) <= kind.axis < len(shape):
        raise ValueError(f"layer_axis={kind.axis} is not a dim of a leaf of shape {shape}.")
    kind = kind._replace(axis=kind.axis % len(shape))
    if isinstance(kind, Stacked) and len(kind.layers) != shape[kind.axis]:
        raise ValueError(
            f"layer_axis={kind} names {len(kind.layers)} layers but dim {kind.axis} of a leaf of "
            f"shape {shape} has {shape[kind.axis]} entries. Name one layer for each entry."
        )
    return kind


def _by_layer(leaves, leaf_axes, L, P, k, sequential):
    k = k if any(not isinstance(kind, Stacked) for kind in leaf_axes) else 0
    if not k < P <= L + k:
        raise ValueError(
            f"num_fragments={P} does not fit {L} layers and {k} fragments for the leaves outside "
            f"of layers. Use 1, or {k + 1} to {L + k}."
        )
    fragment_of = [k + p for p in assign(L, P - k, sequential)]
    slices = [[] for _ in range(P)]
    for i, (leaf, kind) in enumerate(zip(leaves, leaf_axes, strict=True)):
        if isinstance(kind, Stacked):
            for p in range(k, P):
                layers = enumerate(kind.layers)
                entries = [entry for entry, layer in layers if fragment_of[layer] == p]
                if entries:
                    slices[p].append(slice_along(i, kind.axis, entries, leaf.shape))
        elif isinstance(kind, Vocabulary) and k > 1:
            rows = leaf.shape[kind.axis]
            for p in range(min(k, rows)):
                slices[p].append(slice_along(i, kind.axis, range(p, rows, k), leaf.shape))
        else:
            slices[0].append(LeafSlice(i, "whole"))
    return [(slices[p], tuple(i for i in range(L) if fragment_of[i] == p)) for p in range(P)]


def _by_leaf(leaves, P, sequential):
    if P > len(leaves):
        raise ValueError(
            f"num_fragments={P} is more than the {len(leaves)} leaves of params, none of "
            f"which is stacked by layer. Use {len(leaves)} or fewer, or give layer_axis."
        )
    fragment_of = assign(len(leaves), P, sequential)
    alone = [LeafSlice(i, "whole") for i in range(len(leaves))]
    return [([s for s in alone if fragment_of[s.leaf] == p], ()) for p in range(P)]


def assign(n: int, P: int, sequential: bool) -> list[int]:
    """Return the fragment of each of n items: i mod P, or P contiguous runs if `sequential`.

    If P does not divide n, the first runs have one item more.
    """
    if not sequential:
        return [i % P for i in range(n)]
    short, longer = divmod(n, P)
    return [p for p in range(P) for _ in range(short + (p < longer))]


def oversized(sizes: Sequence[int]) -> list[int]:
    """Return the fragments larger than twice the median size: they set the peak bandwidth.

    sizes: size of each fragment, in any unit.
    """
    median = statistics.median(sizes)
    return [p for p, size in enumerate(sizes) if size > 2 * median]
