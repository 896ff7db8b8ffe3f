"""Compile all programs of a run before the first step, with a line for every compile."""

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import jax

from maxdiloco.engine.calls import START, Call
from maxdiloco.metrics.out_of_memory import require_fit

# XLA compiles without the GIL. A run has two or three programs that take long; more threads would
# only need more host memory.
THREADS = 4
PROGRESS_S = 5.0  # between two lines on the progress: a person wonders after some seconds
# Compile time of a program without the inner step, relative to one with it, until one is compiled:
# 0.22 on a CPU, the mean of 6 programs of a model with 4 layers in 3 fragments.
PART_OF_STEP = 0.2


class CompileLog:
    """Prints every compile with its time. Any thread may call it."""

    def __init__(self, say: Callable[[str], None], *, show_memory: bool):
        """Start without programs.

        Args:
          say: prints a line.
          show_memory: whether `compile_all` prints the memory of each program.
        """
        self._say = say
        self._show_memory = show_memory
        self._lock = threading.Lock()
        self._is_silent = False  # after an error, while threads still compile

    def __call__(self, name: str, seconds: float, compiled: jax.stages.Compiled) -> None:
        """Print one compile; see on_compile of parallel.program.Program."""
        with self._lock:
            if not self._is_silent:
                self._say(f"compiled {name} in {seconds:.1f} s")

    def compile_all(self, calls: Sequence[Call], *, remedy: str, resident: str = "") -> list[Any]:
        """Compile the programs of a run, see compile_in_threads. The first error ends it at once.

        Programs for the start that have their arguments run after all others are compiled. On a CPU
        the first state and the memory of the compiler would otherwise add up.

        Args:
          calls: the first one that is not for the start is the plain inner step.
          remedy: the remedy for a program that does not fit the device.
          resident: description of the arrays that a device has in addition to plain training.

        Returns:
          The results of the programs that ran.

        Raises:
          ConfigError: a program does not fit the device.
        """
        started = time.perf_counter()
        hits: list[str] = []  # appended to by threads
        finished = False

        def count(event: str, **_: Any) -> None:
            if event == "/jax/compilation_cache/cache_hits":
                hits.append(event)

        jax.monitoring.register_event_listener(count)
        try:
            with (
                log_progress(self._say, len(calls)) as ended,
                compile_in_threads(calls, ended) as futures,
            ):
                for future in as_completed(futures):
                    call = futures[future]
                    with require_fit(call.program.name, remedy):
                        future.result()
            finished = True
        finally:
            self._is_silent = not finished
            jax.monitoring.unregister_event_listener(count)
        _return_free_memory()
        calls = list(futures.values())
        results = []
        for call in calls:
            leaves = jax.tree.leaves(call.args)
            abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
            if call.when == START and not abstract:
                with require_fit(call.program.name, remedy):
                    results.append(jax.block_until_ready(call.program(*call.args)))
        folder = jax.config.values["jax_compilation_cache_dir"]
        kept = f", {len(hits)} of them from {folder}" if hits else ""
        took = time.perf_counter() - started
        self._say(f"{len(calls)} programs ready after {took:.1f} s{kept}")
        if self._show_memory:
            self._say_memory(sorted(calls, key=lambda call: call.when == START), resident)
        return results

    def announce_each(self, calls: Sequence[Call], *, expected_s: float) -> Iterator[Call]:
        """Yield the calls, each to be compiled before the next, and log the progress.

        A line when a compile begins, and every PROGRESS_S until it ends, has the estimate of the
        time until all programs are compiled.

        Args:
          calls: the first one is the plain inner step.
          expected_s: compile time of a program with the step, until one is compiled.
        """
        left = _TimeLeft(calls, expected_s)
        for index, call in enumerate(calls):
            tell = functools.partial(self._say_turn, left, calls, index)
            begun, known = time.perf_counter(), bool(call.program.compiled)
            tell(0.0)
            with _every(PROGRESS_S, tell):
                yield call
            if not known:
                left.record(index, time.perf_counter() - begun)

    def _say_turn(
        self, left: "_TimeLeft", calls: Sequence[Call], index: int, elapsed: float
    ) -> None:
        since = f" for {elapsed:.0f} s" if elapsed else ""
        self._say(
            f"compiling {calls[index].program.name}, {index + 1} of {len(calls)}{since}, about "
            f"{_rounded(left.seconds(index, elapsed))} left"
        )

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
    """Return the identities of a call's arguments, which calls share."""
    return set(map(id, jax.tree.leaves(call.args)))


class _TimeLeft:
    """Estimates how long the programs that are not compiled yet take, one after another.

    The programs with the inner step take about as long as each other, and so do the others.
    """

    def __init__(self, calls: Sequence[Call], expected_s: float):
        self._holds_step = [_leaves(calls[0]) <= _leaves(call) for call in calls]
        self._expected_s = expected_s
        self._took: dict[bool, list[float]] = {True: [], False: []}

    def record(self, index: int, seconds: float) -> None:
        """Note how long the compile of a program took."""
        self._took[self._holds_step[index]].append(seconds)

    def seconds(self, index: int, elapsed: float) -> float:
        """Return the time left when a program has been compiling for `elapsed` seconds."""
        step_s = fmean(self._took[True] or [self._expected_s])
        others_s = fmean(self._took[False] or [step_s * PART_OF_STEP])
        now, *later = (step_s if holds else others_s for holds in self._holds_step[index:])
        return time_left(now, elapsed) + sum(later)


def time_left(expected_s: float, elapsed: float) -> float:
    """Return the time left of work that was expected to take `expected_s` in all.

    Work that takes longer than expected counts as four fifths done, so the estimate is never 0.
    """
    return max(expected_s - elapsed, elapsed / 4)


def _rounded(seconds: float) -> str:
    """Format an estimate in whole seconds, or else in whole minutes."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextmanager
def log_progress(
    say: Callable[[str], None], total: int, *, expected_s: float | None = None
) -> Iterator[Callable[[Future], None]]:
    """Print a line every PROGRESS_S until `total` programs are compiled.

    Args:
      say: prints a line.
      total: number of programs.
      expected_s: time that all of them are expected to take, for an estimate.

    Yields:
      A function that counts one of them.
    """
    ended: list[Future] = []

    def tell(elapsed: float) -> None:
        if len(ended) < total:
            left = (
                ""
                if expected_s is None
                else f", about {_rounded(time_left(expected_s, elapsed))} left"
            )
            say(f"compiling: {len(ended)} of {total} programs, {elapsed:.0f} s{left}")

    with _every(PROGRESS_S, tell):
        yield ended.append


@contextmanager
def _every(seconds: float, tell: Callable[[float], None]) -> Iterator[None]:
    """Call `tell` in a thread every `seconds`, with the seconds since the start."""
    over, begun = threading.Event(), time.perf_counter()

    def run() -> None:
        while not over.wait(seconds):
            tell(time.perf_counter() - begun)

    thread = threading.Thread(target=run, name="compile-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _return_free_memory() -> None:
    """Return free memory of the heap to the system: over 1 GB after compiling peer25m for CPU.

    XLA's threads leave small blocks between those that they free, and glibc keeps all below the
    last one.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # not glibc's
        return
    trim(0)


@contextmanager
def compile_in_threads(
    calls: Iterable[Call], ended: Callable[[Future], None] = lambda future: None
) -> Iterator[dict[Future, Call]]:
    """Compile programs in threads, each from when the iterable yields it.

    This thread lowers them one after another, so that the first compiles early. After an error in
    the context no other program is begun, and programs that are being compiled are not waited for.

    Args:
      calls: of the programs.
      ended: called with each future that is done, in any thread.

    Yields:
      The calls by their futures.
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
