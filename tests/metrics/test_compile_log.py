"""Every program before the first step, several at a time, and what one that cannot be made says."""

import contextlib
import itertools
import pathlib
import platform
import re
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiloco.engine.calls import START, Call
from maxdiloco.errors import ConfigError
from maxdiloco.metrics import compile_log
from maxdiloco.metrics.compile_log import THREADS, CompileLog
from maxdiloco.parallel.program import Program


def call(name, compile_):
    program = types.SimpleNamespace(name=name, lowered=lambda *args: compile_)
    return Call(program, (), 1)


def compile_all(calls, said=lambda line: None):
    return CompileLog(said, show_memory=False).compile_all(calls, remedy="Use more.")


def failing(text):
    def compile_(*args):
        raise jax.errors.JaxRuntimeError(text)

    return compile_


def test_a_program_compiles_while_the_next_one_is_lowered():
    """One after another, as Python holds the GIL: two at a time would only make the first compile
    later. The second is lowered once the first program compiles: otherwise it never would be."""
    compiling, lowered = threading.Event(), []

    def program(name):
        def lower(*args):
            assert threading.current_thread() is threading.main_thread()
            assert lowered == [] or compiling.wait(60)
            lowered.append(name)
            return compiling.set

        return Call(types.SimpleNamespace(name=name, lowered=lower), (), 1)

    compile_all([program("init"), program("inner")])
    assert lowered == ["init", "inner"]


def test_a_compile_that_takes_long_says_how_far_it_is(monkeypatch):
    """Each reading of the clock adds 6 s. The second program compiles until two lines have counted
    the first. Control: with the period of 5 s a short compile logs nothing on its way."""
    said, counted = [], threading.Event()

    def hear(line):
        said.append(line)
        if len(said) > 1 and line.startswith("compiling: 1 of 2 "):
            counted.set()

    def second():
        assert counted.wait(60)

    compile_all([call("inner", lambda: None)] * 2, hear)
    assert len(said) == 1 and said[0].startswith("2 programs ")
    del said[:]
    looks = itertools.count(0, 6)
    monkeypatch.setattr(
        compile_log, "time", types.SimpleNamespace(perf_counter=lambda: next(looks))
    )
    monkeypatch.setattr(compile_log, "PROGRESS_S", 0.01)
    compile_all([call("inner", lambda: None), call("init", second)], hear)
    told = [re.fullmatch(r"compiling: [01] of 2 programs, (\d+) s", line)[1] for line in said[:-1]]
    assert told == [str(6 * count) for count in range(1, len(said))]


def in_turn(name, *args, compiled=False):
    return Call(types.SimpleNamespace(name=name, compiled=compiled), args, 1)


def test_programs_in_turn_say_which_begins_and_what_is_left(monkeypatch):
    """Programs with the step take 100 s, where 50 were expected, the others 10 s; one that is
    compiled already takes none."""
    params, batch, chunk, said, now = object(), object(), object(), [], [0.0]
    monkeypatch.setattr(compile_log, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    calls = [
        in_turn("inner", params, batch),
        in_turn("inner + exchange", params, batch, chunk),
        in_turn("pack", params),
        in_turn("merge", params, chunk, compiled=True),
        in_turn("init"),
    ]
    log = CompileLog(said.append, show_memory=False)
    for call in log.announce_each(calls, expected_s=50.0):
        now[0] += {"inner": 100, "inner + exchange": 100, "merge": 0}.get(call.program.name, 10)
        assert said[-1].startswith(f"compiling {call.program.name}, {len(said)} of 5")
    # 2 * 50 s + 3 * 10 s; 100 s + 3 * 20 s; then 2 * 10 s after the last step's program.
    assert [re.search(r"about (.*) left$", line)[1] for line in said] == [
        "2 min", "3 min", "60 s", "20 s", "10 s",
    ]  # fmt: skip


def test_a_long_compile_counts_down_and_never_says_that_nothing_is_left(monkeypatch):
    """Each line 40 s after the one before: 60 of 100 s are left, 20, then a quarter of 120."""
    said, looks, full = [], itertools.count(0, 40), threading.Event()

    def hear(line):
        said.append(line)
        if len(said) == 4:
            full.set()

    monkeypatch.setattr(
        compile_log, "time", types.SimpleNamespace(perf_counter=lambda: next(looks))
    )
    monkeypatch.setattr(compile_log, "PROGRESS_S", 0.01)
    log = CompileLog(hear, show_memory=False)
    # Each reading of the clock but the first, of the compile, is one of a line.
    for _ in log.announce_each([in_turn("inner", object())], expected_s=100.0):
        assert full.wait(60)
    assert [re.search(r"about (.*) left$", line)[1] for line in said[:4]] == [
        "2 min", "60 s", "20 s", "30 s",
    ]  # fmt: skip


def resident():
    """Bytes of this process that are in memory."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other heaps do it by themselves")
def test_what_compiling_freed_is_returned_to_the_system():
    """200 MB of small blocks, of which the last one stays, as a compiler leaves them."""
    blocks, before = [bytes(2000) for _ in range(100_000)], resident()
    del blocks[:-1]
    kept = resident()
    compile_all([call("inner", lambda: None)])
    assert kept > before - 50e6 and resident() < before - 150e6


def test_a_program_of_the_start_runs_after_all_others_have_compiled():
    """It runs in the calling thread, whose heap keeps the memory that is freed. Control: the
    program of a step is not run."""
    compiled = threading.Event()

    class First:
        name = "init"

        def lowered(self, seed):
            return lambda: None

        def __call__(self, seed):
            assert threading.current_thread() is threading.main_thread()
            assert compiled.is_set()
            return f"state of seed {seed}"

    def other():
        time.sleep(0.2)
        compiled.set()

    calls = [Call(First(), (3,), 0, START), call("inner", other)]
    said = []
    assert compile_all(calls, said.append) == ["state of seed 3"]
    assert said[-1].startswith("2 programs ")


def test_a_program_that_does_not_fit_is_named_with_the_remedy():
    """When it compiles, or when it runs, as on a CPU and a GPU: 2**60 bytes are beyond any
    processor's addresses."""
    text = "RESOURCE_EXHAUSTED: Ran out of memory in hbm. Used 18G\nof 16G."
    with pytest.raises(ConfigError) as error:
        compile_all([call("inner", lambda: None), call("merge [2 leaves]", failing(text))])
    line = str(error.value)
    assert "merge [2 leaves]" in line and "Use more." in line and "\n" not in line
    init = Program("init", lambda x: jnp.full(2**58, x), on_compile=lambda *_: None)
    init.compile(np.float32(1))
    calls = [call("inner", lambda: None), Call(init, (np.float32(1),), 0, START)]
    with pytest.raises(ConfigError, match=r"^init .* Use more\.$"):
        compile_all(calls)


PROGRAM = """
import time, types
import jax
from maxdiloco.command_line import end_with, guarded
from maxdiloco.engine.calls import Call
from maxdiloco.metrics.compile_log import CompileLog

@guarded
def main(argv):
    def long():
        time.sleep(1)
        log("long", 1.0, None)
        time.sleep(60)

    def failing():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Too big.")

    log = CompileLog(print, show_memory=False)
    programs = [types.SimpleNamespace(name="merge", lowered=lambda body=body: body)
                for body in (long, failing)]
    log.compile_all([Call(program, (), 1) for program in programs], remedy="Use more.")

end_with(main)
"""


def test_a_failure_ends_the_process_during_another_compile():
    """Which would take a minute; nothing is said of it after the error."""
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ConfigError: merge ") and done.stderr.count("\n") == 1
    assert time.monotonic() - begun < 40


def test_after_an_error_that_is_not_hidden_the_queue_is_dropped():
    """Each thread has a program, and the one that failed may have taken one more."""
    over, begun = threading.Event(), []

    def body():
        begun.append(1)
        assert over.wait(60)

    calls = [call("merge", failing("INTERNAL: a bug")), *[call("merge", body)] * 50]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: a bug"):
        compile_all(calls)
    over.set()
    for thread in threading.enumerate():
        if thread.name.startswith("compile"):
            thread.join()
    assert len(begun) <= THREADS


@pytest.mark.parametrize("error", [None, "INTERNAL: a bug"])
def test_nothing_listens_to_jax_afterwards(monkeypatch, error):
    """Also after an error. Control: something listens while a program compiles."""
    listeners, seen = [], []
    monkeypatch.setattr(jax.monitoring, "register_event_listener", listeners.append)
    monkeypatch.setattr(jax.monitoring, "unregister_event_listener", listeners.remove)

    def body():
        seen.append(len(listeners))
        if error:
            raise jax.errors.JaxRuntimeError(error)

    with pytest.raises(jax.errors.JaxRuntimeError) if error else contextlib.nullcontext():
        compile_all([call("inner", body)])
    assert (seen, listeners) == ([1], [])
