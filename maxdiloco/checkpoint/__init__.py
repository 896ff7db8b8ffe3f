"""Checkpoints of runs: each is whole or absent, and can be read with another M and mesh.

Orbax writes the arrays, and TensorStore, its file layer, reads them. The rest is here, and not
Orbax's Checkpointer with its save and preservation policies (0.12, where they are experimental),
for these reasons:

* `write`: Orbax renames a finished checkpoint without fsync, so that a power cut can undo it.
* `seal`: Orbax reads some damaged files as numbers; the seal finds damage before anything is read.
* `own_folder`: Orbax's policies see all checkpoints in a folder. LatestN(1) removed the checkpoints
  of another run, and a person's folder with the name of a step.
* `checkpointer`: a failed save is a warning and is retried, in all processes or in none.
* `arrays`: a byte leaves the storage once instead of once a slice. A run resumes with another
  number of replicas. An import or export holds one part of a model in memory.
* `staging`: Orbax cannot write to s3:// and az://.
* `metadata`: the fields of other people's checkpoints are checked before they are used.

A save every `checkpoint_period` steps is one condition in run.loop.
"""
