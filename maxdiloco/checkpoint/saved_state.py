"""The items to read of a checkpoint that another number of replicas may have saved.

    # R replicas
"""

from typing import Any

import jax

from maxdiloco.checkpoint.arrays import Cycled
from maxdiloco.engine.trainer import SavedLayout, Trainer


def abstract_items(trainer: Trainer, saved: SavedLayout) -> dict[str, Any]:
    """{item: tree of ShapeDtypeStruct or Cycled}: replica r takes that of old r mod the old M."""
    items = trainer.abstract_items(saved)
    if saved.num_replicas == trainer.num_replicas:
        return items
    return items | {
        name: jax.tree.map(lambda x: Cycled(x, stored=saved.num_replicas), items[name])
        for name in trainer.replica_items(saved)
    }
