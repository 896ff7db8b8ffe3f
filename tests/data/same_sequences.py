"""What runs read of a data set, to be compared with what they read of a copy elsewhere."""

import numpy as np
from data.shards_on_disk import open_dataset

from maxdiloco.data import order, pipeline

KEYS = dict(max_target_length=16, data_shuffle_seed=3)
ROWS = dict(replicas=[[0], [1]], rows=range(3))  # three of each of two replicas


def sequences(cfg, *, steps=range(1, 13)):
    """What two replicas of three rows read in some steps."""
    data = open_dataset(cfg)
    with pipeline.batches(data, order.first_position(2, 3), steps=steps, **ROWS) as batches:
        return list(batches), data.contents


def evaluated(cfg):
    data = open_dataset(cfg, split="eval")
    with pipeline.eval_batches(data, batch_size=5, num_sequences=23) as batches:
        return list(batches), data.contents


def assert_equal(mine, theirs):
    (mine, contents), (theirs, other) = mine, theirs
    assert contents == other and len(mine) == len(theirs) > 3
    for one, two in zip(mine, theirs, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])
