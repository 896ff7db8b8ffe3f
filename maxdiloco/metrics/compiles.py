"""A line for every compile, and all compiles before the first step."""

import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import jax

from maxdiloco.engine.calls import START, Call
from maxdiloco.errors import ConfigError
from maxdiloco.output import span

# XLA compiles without the GIL; more threads need more host memory (our choice).
THREADS = 4
TELL_S = 5.0  # of compiling, until a line says how far it is; our choice
# Compile time of a program without the inner step, relative to one with it, until one is compiled:
# 0.22 on a CPU, the mean of 6 programs of a model with 4 layers in 3 fragments.
OF_STEP = 0.2


class CompileLog:
    """Prints every compile with its time; any thread may call it."""

    def __init__(self, say: Callable[[str], None], *, show_memory: bool):
        self._say = say
        self._show_memory = show_memory
        self._lock = threading.Lock()
        self._silent = False  # after an error, while threads that nothing waits for still compile

    def __call__(self, name: str, seconds: float, compiled: jax.stages.Compiled) -> None:
        """Print one compile; see on_compile of parallel.program.Program."""
        with self._lock:
            if not self._silent:
                self._say(f"compiled {name} in {seconds:.1f} s")

    def all_of(self, calls: Sequence[Call], *, room: str, resident: str = "") -> list[Any]:
        """Compile the programs of a run, see side_by_side; the first error ends it at once.

        The first that is not for the start is the plain inner step. Those for the start that have
        their arguments run while others compile; returns their results. resident: what DiLoCo keeps
        on a device beyond plain training. Raises ConfigError, with `room` as the remedy, for a
        program that does not fit the device.
        """
        started = time.perf_counter()
        hits: list[str] = []  # appended to by threads
        results = []
        finished = False

        def count(event: str, **_: Any) -> None:
            if event == "/jax/compilation_cache/cache_hits":
                hits.append(event)

        jax.monitoring.register_event_listener(count)
        try:
            with told(self._say, len(calls)) as ended, side_by_side(calls, ended) as futures:
                for future in as_completed(futures):
                    call = futures[future]
                    with fitting(call.program.name, room):
                        future.result()
                        leaves = jax.tree.leaves(call.args)
                        abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
                        if call.when == START and not abstract:
                            results.append(jax.block_until_ready(call.program(*call.args)))
            finished = True
        finally:
            self._silent = not finished
            jax.monitoring.unregister_event_listener(count)
        _return_free_memory()
        calls = list(futures.values())
        folder = jax.config.values["jax_compilation_cache_dir"]
        kept = f", {len(hits)} of them from {folder}" if hits else ""
        took = time.perf_counter() - started
        self._say(f"{len(calls)} programs ready after {took:.1f} s{kept}")
        if self._show_memory:
            self._say_memory(sorted(calls, key=lambda call: call.when == START), resident)
        return results

    def in_turn(self, calls: Sequence[Call]) -> Iterator[Call]:
        """The calls, each to be compiled before the next; a line when each begins.

        The first is the plain inner step. The time that is left is the mean of the programs so far:
        of those that hold the step, and of the others.
        """
        holds_step = [_leaves(calls[0]) <= _leaves(call) for call in calls]
        took: dict[bool, list[float]] = {True: [], False: []}
        for done, (call, kind) in enumerate(zip(calls, holds_step, strict=True)):
            left = ""
            if took[True]:
                means = {True: fmean(took[True])}
                means[False] = fmean(took[False] or [means[True] * OF_STEP])
                left = f", about {span(sum(means[each] for each in holds_step[done:]))} left"
            self._say(f"compiling {call.program.name}, {done + 1} of {len(calls)}{left}")
            begun, known = time.perf_counter(), bool(call.program.compiled)
            yield call
            if not known:
                took[kind].append(time.perf_counter() - begun)

    def _say_memory(self, calls: Sequence[Call], resident: str) -> None:
        plain = calls[0].program.compile(*calls[0].args).memory_analysis()
        for call in calls:
            memory = call.program.compile(*call.args).memory_analysis()
            sizes = {
                "arguments": memory.argument_size_in_bytes,
                "outputs": memory.output_size_in_bytes,
                "of these shared": memory.alias_size_in_bytes,
                "temporary": memory.temp_size_in_bytes,
                "on the host": memory.host_argument_size_in_bytes,
            }
            shown = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
            self._say(f"{call.program.name}: memory a device [MiB]: {shown}")
            if resident:
                more = max(0, memory.temp_size_in_bytes - plain.temp_size_in_bytes)
                self._say(
                    f"  beyond plain training [MiB a device]: {resident}, temporary "
                    f"{more / 2**20:.1f}"
                )


def _leaves(call: Call) -> set[int]:
    """Identities of a call's arguments, which calls share."""
    return set(map(id, jax.tree.leaves(call.args)))


@contextmanager
def told(say: Callable[[str], None], total: int) -> Iterator[Callable[[Future], None]]:
    """A line every TELL_S until so many programs are compiled. Gives what counts one of them."""
    ended, over, begun = [], threading.Event(), time.perf_counter()

    def tell():
        while not over.wait(TELL_S) and len(ended) < total:
            seconds = time.perf_counter() - begun
            say(f"compiling: {len(ended)} of {total} programs, {seconds:.0f} s")

    thread = threading.Thread(target=tell, name="compile-progress", daemon=True)
    thread.start()
    try:
        yield ended.append
    finally:
        over.set()
        thread.join()


def _return_free_memory() -> None:
    """Return free memory of the heap to the system: over 1 GB after compiling peer25m for CPU.

    Its threads leave small blocks between what they free, and glibc keeps all below the last one.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # not glibc's
        return
    trim(0)


@contextmanager
def side_by_side(
    calls: Iterable[Call], ended: Callable[[Future], None] = lambda future: None
) -> Iterator[dict[Future, Call]]:
    """Compile programs in threads, each from when the iterable gives it; their calls by future.

    This thread lowers them one after another, so that the first compiles early. After an error in
    the context no other program is begun, and what is being compiled is not waited for.
    ended: called with each future that is done, in any thread.
    """
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="compile")

    def begun(call):
        future = pool.submit(call.program.lowered(*call.args))
        future.add_done_callback(ended)
        return future

    try:
        yield {begun(call): call for call in calls}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def fitting(name: str, room: str) -> Iterator[None]:
    """Raises ConfigError, `room` its remedy, where the program compiled or run does not fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (reason := too_big(error)) is None:
            raise
        raise ConfigError(f"{name} does not fit the device: {reason} {room}") from error


def too_big(error: jax.errors.JaxRuntimeError) -> str | None:
    """The message of XLA when a program does not fit; None for another error."""
    _, status, message = str(error).replace("\n", " ").partition("RESOURCE_EXHAUSTED: ")
    if not status:
        return None
    end = message.find(". ")
    return message[: end + 1] if end > 0 else message


def temporaries(message: str, arguments: int) -> int:
    """Bytes of temporaries, without `arguments`, in the message of `too_big`; 0 if it has none."""
    number = r"([\d.]+)([KMGT])"
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    if found := re.search(rf"HLO temporaries \({number}\)", message):
        return int(float(found[1]) * units[found[2]])
    if found := re.search(rf"Used {number} of", message):
        return max(0, int(float(found[1]) * units[found[2]]) - arguments)
    return 0
