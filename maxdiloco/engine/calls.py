"""Every program that a run calls: its arguments, how often, and the memory that it needs."""

import math
from typing import Any, NamedTuple

import jax

from maxdiloco.parallel.program import Program

# When a program runs: in the steps; beside them, with the run's state on the devices; or at the
# start, before there is a state.
STEP, BESIDE, START = "step", "beside", "start"
# What a program beside the steps is run for, unless for every step. Only the first has programs: a
# save writes what the state has, a log step reads it.
EVALUATION, SAVE, LOG = "evaluation", "save", "log step"


class Call(NamedTuple):
    """A program with its arguments as ShapeDtypeStructs.

    runs: how often it runs in the H steps of a period, after the first exchanges.
    when: STEP, BESIDE or START. event: EVALUATION, SAVE, LOG, or "". beside: what is on the device
    while it runs, besides its arguments, its results and the state.
    """

    program: Program
    args: tuple
    runs: float
    when: str = STEP
    event: str = ""
    beside: tuple[jax.ShapeDtypeStruct, ...] = ()


# -- memory ----------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes on one device. peak: of the program; elsewhere: what else is there while it runs."""

    arguments: int
    outputs: int
    temporary: int
    peak: int
    elsewhere: int

    @property
    def needed(self) -> int:
        """Bytes that have to fit the chip while the program runs."""
        return self.peak + self.elsewhere


def memory_of(compiled: jax.stages.Compiled, call: Call, state: Any) -> Memory:
    """The memory of a call's program. state: what the run keeps, as ShapeDtypeStructs."""
    analysis = compiled.memory_analysis()
    arguments, outputs = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    temporary, shared = analysis.temp_size_in_bytes, analysis.alias_size_in_bytes
    peak = arguments + outputs - shared + temporary + analysis.generated_code_size_in_bytes
    return Memory(arguments, outputs, temporary, peak, elsewhere(call, state))


def elsewhere(call: Call, state: Any) -> int:
    """Bytes on a device of Call.beside and of the run's state that the program does not take."""
    # A program that runs at the start makes the state, so no other state is on the device.
    kept = [x for x in jax.tree.leaves(state) if is_on_device(x) and call.when != START]
    kept_ids = {id(x) for x in kept}
    passed = [x for x in jax.tree.leaves(call.args) if id(x) in kept_ids]
    return sum(map(bytes_on_device, [*kept, *call.beside])) - sum(map(bytes_on_device, passed))


def is_on_device(x: Any) -> bool:
    """Whether an argument is an array in the device's own memory."""
    is_array = isinstance(x, jax.ShapeDtypeStruct)
    return is_array and x.sharding.memory_kind in (None, "device")


def bytes_on_device(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array's shard, without tile padding."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
