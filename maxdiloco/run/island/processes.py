"""The processes of an island: process 0 decides, and the others do the same in the same order.

Process 0 alone has the driver, its threads, the store and the lease of data. What it does to the
state is told to the others before it does it, and after each inner step they get where all stand
then: between two inner steps of which nothing comes, that is the only message.
"""

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from maxdiloco.cluster.payloads import CONTROL
from maxdiloco.engine.host_transfer import Mailbox
from maxdiloco.islands import core, rules
from maxdiloco.islands.driver import Driver
from maxdiloco.islands.island import DONE
from maxdiloco.islands.records import Run

_WORD = ("island",)  # the key of what process 0 does, in order
_LOOK_S = 0.05  # of a reader for the end of its run; our choice

# What process 0 is about to do, or where all stand.
TAKE, PUT, WITHOUT_MOMENTS, GO = "take", "put", "without moments", "go"

Ranges = list[tuple[int, int]]


class Standing(NamedTuple):
    """What the loop in all processes acts by until the next one.

    records, tokens: of the log of fragment 0. progress: of the run; with_own: with the tokens of
    this island that are on their way, and as many of each other that is alive: a rate by its own
    alone would rise by the others' when they are committed, and its messages grow too long.
    warm_from: the step at which a warm-up began, if any. ended: no step follows. evaluates: this
    island is to. may_step: the next step asks for no standing.
    """

    records: int
    tokens: int
    progress: float
    with_own: float
    warm_from: int | None
    ended: bool
    evaluates: bool
    may_step: bool

    @property
    def line(self) -> str:
        """Of the log, for the user."""
        done = f"{100 * self.progress:.1f} % of the run"
        return f"{self.records} records, {self.tokens:,} tokens committed, {done}"


def is_over(run: Run, driver: Driver) -> bool:
    """Whether all tokens of the run are committed, as of now."""
    if driver.stop is not None and driver.stop.why == DONE:
        return True
    ledger = driver.state.logs[0].ledger  # None while it joins again
    return ledger is not None and rules.progress(run, ledger) >= 1


def standing(run: Run, driver: Driver, *, warm_from: int | None, several: bool) -> Standing:
    """As of now. several: processes, which save a message where the next step may begin."""
    state, log = driver.state, driver.state.logs[0]
    own = log.tokens + sum(each.message.tokens for each in log.own)
    alive = rules.alive(state.seen, core.watched(state), state.pace) | {state.name}
    return Standing(
        records=log.ledger.number,
        tokens=log.ledger.tokens,
        progress=rules.progress(run, log.ledger),
        with_own=min((log.ledger.tokens + own * len(alive)) / run.tokens, 1.0),
        warm_from=warm_from,
        ended=is_over(run, driver),
        evaluates=bool(driver.evaluations),
        may_step=several and driver.stop is None and driver.may_step(),
    )


class Processes:
    """This process among those of its island. mailbox: None of one process.

    decides: whether it is process 0.
    """

    def __init__(self, mailbox: Mailbox | None):
        self._mailbox, self.several = mailbox, mailbox is not None
        self.decides = not self.several or jax.process_index() == 0

    def tell(self, what: str, value: Any = None) -> None:
        """Tell the others what process 0 is about to do, or where all stand. Waits for no one."""
        self._send(_WORD, [what, value])

    def told(self) -> tuple[str, Any]:
        """What process 0 tells next; waits as long as it lives. Raises LostPeerError."""
        while True:
            try:
                return tuple(self._get(_WORD, self._mailbox.timeout_s))
            except TimeoutError:  # it waits for the store, or for other islands
                continue

    def first(self, work: Callable[[], None]) -> None:
        """Have process 0 do it alone, and the others wait; where it fails all end."""
        if self.decides:
            work()
            self.tell(GO)
        else:
            self.told()

    def ranges(self, step: int, find: Callable[[int], Ranges], over: Callable[[], bool]) -> Ranges:
        """What process 0 finds for a step; nothing once no step follows. For readers, any thread.

        over: whether none does.
        """
        key = "ranges", step
        if self.decides:
            found = find(step)
            self._send(key, found)
            return found
        while not over():
            try:
                return [(first, count) for first, count in self._get(key, _LOOK_S)]
            except TimeoutError:
                continue
        return []

    def _send(self, key: tuple[str | int, ...], value: Any) -> None:
        if self.several:
            data = [json.dumps(value).encode()]
            for peer in range(1, jax.process_count()):
                self._mailbox.put(peer, key, data, CONTROL)

    def _get(self, key: tuple[str | int, ...], within_s: float) -> Any:
        return json.loads(self._mailbox.get(0, key, time.monotonic() + within_s))
