"""Every compile, said as it happens, and all of them before the first step."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from maxdiloco.engine.calls import Call
from maxdiloco.errors import ConfigError

# XLA compiles without the GIL; more at a time need more memory of the host (our choice).
THREADS = 4
# What to do when a program does not fit.
MAKE_ROOM = (
    "Use more devices in a slice, a smaller per_device_batch_size, remat_policy=full or "
    "diloco_outer_memory=pinned_host."
)


class Compiles:
    """Says every compile with the time it took, from any thread.

    resident: what DiLoCo keeps beyond plain training, for the memory lines; set when known.
    """

    def __init__(self, say: Callable[[str], None], *, show_memory: bool):
        self._say = say
        self._show_memory = show_memory
        self._lock = threading.Lock()
        self.resident = ""

    def __call__(self, name: str, seconds: float, compiled: jax.stages.Compiled) -> None:
        """Take note of one compile, see parallel.program.Program."""
        with self._lock:
            self._say(f"compiled {name} in {seconds:.1f} s")

    def all_of(self, calls: Sequence[Call]) -> None:
        """Compile the programs of a run, several at a time; the first is the plain inner step.

        Raises ConfigError for one that does not fit the device's memory.
        """
        started = time.perf_counter()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="compile")
        try:
            waiting = [(call, pool.submit(call.program.compile, *call.args)) for call in calls]
            for call, future in waiting:
                try:
                    future.result()
                except jax.errors.JaxRuntimeError as error:
                    if (reason := too_big(error)) is None:
                        raise
                    raise ConfigError(
                        f"{call.program.name} does not fit the device: {reason} {MAKE_ROOM}"
                    ) from error
        finally:
            pool.shutdown(cancel_futures=True)
        self._say(f"{len(calls)} programs ready after {time.perf_counter() - started:.1f} s")
        if self._show_memory:
            self._say_memory(calls)

    def _say_memory(self, calls: Sequence[Call]) -> None:
        plain, *_ = [call.program.compile(*call.args).memory_analysis() for call in calls]
        for call in calls:
            memory = call.program.compile(*call.args).memory_analysis()
            self._say(f"{call.program.name}: {memory_line(memory)}")
            if self.resident:
                more = max(0, memory.temp_size_in_bytes - plain.temp_size_in_bytes)
                self._say(
                    f"  beyond plain training [MiB a device]: {self.resident}, temporary "
                    f"{more / 2**20:.1f}"
                )


def too_big(error: jax.errors.JaxRuntimeError) -> str | None:
    """What the compiler says of a program that does not fit; None for another error."""
    _, found, said = str(error).replace("\n", " ").partition("RESOURCE_EXHAUSTED: ")
    if not found:
        return None
    end = said.find(". ")
    return said[: end + 1] if end > 0 else said


def memory_line(memory: Any) -> str:
    """What one compiled program needs on a device."""
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "of these shared": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "on the host": memory.host_argument_size_in_bytes,
    }
    shown = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
    return f"memory a device [MiB]: {shown}"
