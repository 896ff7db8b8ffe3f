"""Checkpoints of runs: each is whole or absent, and can be read with another M and mesh.

Orbax writes the arrays, and TensorStore, its file layer, reads them. This package has the rest. It
does not use Orbax's Checkpointer and its policies (experimental in 0.12), for these reasons:

* `write`: Orbax renames a finished checkpoint without fsync, so that a power cut can undo it.
* `seal`: Orbax reads some damaged files as numbers; the seal finds damage before anything is read.
* `own_folder`: Orbax's policies apply to all checkpoints in a folder. LatestN(1) removed the
  checkpoints of another run, and a user's folder that was named like a step.
* `checkpointer`: a failed save is a warning and is retried, in all processes or in none.
* `arrays`: a byte is read from the storage once, not once for each slice. A run resumes with
  another number of replicas. An import or export holds one part of a model in memory.
* `staging`: Orbax cannot write to s3:// and az://.
* `metadata`: the fields of other people's checkpoints are checked before they are used.

run.loop decides when to save: every `checkpoint_period` steps.
"""
