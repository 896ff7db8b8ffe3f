"""Whether a state is finite, asked of what this process holds of it; nothing is sent.

    # R replicas  F leaves
"""

from typing import Any

import jax
import numpy as np

from maxdiloco.engine import describe
from maxdiloco.engine.state import Layout, State
from maxdiloco.errors import NumericsError


def check_flags(layout: Layout, flags_RF: jax.Array, t: int) -> None:
    """Raise NumericsError if a flag of State.bad is set. t: the inner step that is done."""
    bad_RF = np.asarray(flags_RF)
    if bad_RF.any():
        raise NumericsError(describe.not_finite(layout, bad_RF, t))


def check(layout: Layout, state: State) -> None:
    """Raise NumericsError if a flag is set, or a parameter or theta has a value that is not finite.

    A state that a step has taken over since has nothing to check.
    """
    looked_at = state.params, state.outer, state.bad
    if any(x.is_deleted() for x in jax.tree.leaves(looked_at)):
        return
    check_flags(layout, state.bad, state.t)
    check_params(state.params, state.t)
    if bad := first_bad(state.outer):
        raise NumericsError(describe.bad_parameter(f"theta{bad[0]}", state.t))


def check_params(params: Any, t: int, *, replicas: bool = True) -> None:
    """Raise NumericsError for a value that is not finite. replicas: whether leaves are [R, ...]."""
    if bad := first_bad(params):
        replica = bad[1] if replicas else None
        raise NumericsError(describe.bad_parameter(f"params{bad[0]}", t, replica=replica))


def first_bad(tree: Any) -> tuple[str, int] | None:
    """(path of a leaf, entry of its first dim) with a NaN or infinity in this process, or None.

    tree: of floating-point arrays. Waits for them. They are read on the host, where a save needs
    them too: a program of its own would compile in the middle of a run.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        for shard in {str(shard.index): shard for shard in x.addressable_shards}.values():
            if (entry := _bad_entry(np.isfinite(np.asarray(shard.data)))) is not None:
                return jax.tree_util.keystr(path), _start(shard) + entry
    return None


def _bad_entry(finite: np.ndarray) -> int | None:
    if finite.all():
        return None
    rows = finite.reshape(finite.shape[0], -1).all(axis=1) if finite.ndim else finite[None]
    return int(np.argmin(rows))


def _start(shard: Any) -> int:
    return (shard.index[0].start or 0) if shard.index else 0
