"""Checks for NaN and infinity in the arrays of a state that this process holds. No traffic.

# R replicas  F leaves
"""

from typing import Any

import jax
import numpy as np

from maxdiloco.engine.layout import Layout, State
from maxdiloco.errors import NumericsError


def check_flags(layout: Layout, flags_RF: jax.Array, t: int) -> None:
    """Raise NumericsError if a flag of State.bad is set. t: number of inner steps done."""
    bad_RF = np.asarray(flags_RF)
    if bad_RF.any():
        m, leaf = np.argwhere(bad_RF)[0]
        raise NumericsError(
            f"step {t}: the outer gradient of replica {m} has a NaN or infinity in "
            f"params{layout.paths[leaf]}. No replica applied it. Resume from the last "
            f"checkpoint with a lower learning rate, or skip inner steps that are not finite."
        )


def check(layout: Layout, state: State) -> None:
    """Raise NumericsError for a set flag or a bad value, unless the state was donated."""
    looked_at = state.params, state.outer, state.bad
    if any(x.is_deleted() for x in jax.tree.leaves(looked_at)):
        return
    check_flags(layout, state.bad, state.t)
    check_params(state.params, state.t)
    check_params(state.outer, state.t, name="outer parameters", replicas=False)


def check_params(params: Any, t: int, *, name: str = "params", replicas: bool = True) -> None:
    """Raise NumericsError for a value that is not finite.

    The host reads the values, because a save needs them there as well. A
    device program would have to be compiled in the middle of a run.

    Args:
      params: the arrays.
      t: number of inner steps done.
      name: name of the arrays in the message.
      replicas: whether the first dim is R; the message then names the replica.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        for shard in {str(shard.index): shard for shard in x.addressable_shards}.values():
            finite = np.isfinite(np.asarray(shard.data))
            if finite.all():
                continue
            whose = ""
            if replicas:
                first = (shard.index[0].start or 0) + np.argwhere(~finite)[0][0]
                whose = f" of replica {first}"
            raise NumericsError(
                f"step {t}: {name}{jax.tree_util.keystr(path)}{whose} has a NaN or infinity: this "
                "state cannot be used. Resume from the last checkpoint with a lower learning rate."
            )
