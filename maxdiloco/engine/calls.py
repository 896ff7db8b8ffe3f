"""The programs that a run calls: their arguments, how often they run, and their memory."""

import math
from typing import Any, NamedTuple

import jax

from maxdiloco.parallel.program import Program

# When a program runs: in a step; between two steps, while the run's state is on the devices; or at
# the start, before the state exists.
STEP, OUTSIDE, START = "step", "outside", "start"
# The event for which a program runs between two steps. Only an evaluation has separate programs: a
# save writes the arrays of the state, and a log step reads them.
EVALUATION, SAVE, LOG = "evaluation", "save", "log step"


class Call(NamedTuple):
    """A program with its arguments as ShapeDtypeStructs.

    Attributes:
      program: the program.
      args: its arguments.
      runs: how often it runs in a period of H steps, once exchanges are in flight.
      when: STEP, OUTSIDE or START.
      event: EVALUATION, SAVE or LOG; "" for a program that runs after every step.
    """

    program: Program
    args: tuple
    runs: float
    when: str = STEP
    event: str = ""


# -- memory ----------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Memory on one device while a program runs [bytes].

    Attributes:
      arguments, outputs, temporary: the program's arguments, results and temporary arrays.
      peak: the program's peak memory.
      elsewhere: the arrays of the run's state that are not arguments of the program.
    """

    arguments: int
    outputs: int
    temporary: int
    peak: int
    elsewhere: int

    @property
    def needed(self) -> int:
        """Bytes that must fit the chip while the program runs."""
        return self.peak + self.elsewhere


def memory_of(compiled: jax.stages.Compiled, call: Call, state: Any) -> Memory:
    """Return the memory of a call's program. state: the run's state, as ShapeDtypeStructs."""
    analysis = compiled.memory_analysis()
    arguments, outputs = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    temporary, shared = analysis.temp_size_in_bytes, analysis.alias_size_in_bytes
    peak = arguments + outputs - shared + temporary + analysis.generated_code_size_in_bytes
    return Memory(arguments, outputs, temporary, peak, elsewhere(call, state))


def elsewhere(call: Call, state: Any) -> int:
    """Return the bytes on a device of the run's state that are not arguments of the program."""
    # A program that runs at the start makes the state, so no other state is on the device.
    kept = [x for x in jax.tree.leaves(state) if is_on_device(x) and call.when != START]
    kept_ids = {id(x) for x in kept}
    passed = [x for x in jax.tree.leaves(call.args) if id(x) in kept_ids]
    return sum(map(bytes_on_device, kept)) - sum(map(bytes_on_device, passed))


def is_on_device(x: Any) -> bool:
    """Tell whether an argument is an array in the device's own memory."""
    is_array = isinstance(x, jax.ShapeDtypeStruct)
    return is_array and x.sharding.memory_kind in (None, "device")


def bytes_on_device(x: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array's shard, without tile padding."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
