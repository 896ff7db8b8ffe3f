"""Acts in a process of a run at a moment of its schedule: for tests and benchmarks of faults.

Moments are exact however fast the machine is, because the process itself reaches them:
inner steps, first step: before inner step t, when nothing was sent. in flight: the same, for a t
between a send and its apply. at apply: what step t sends has not left yet, so that the others come
to wait for it. checkpoint: the arrays of step t are about to be complete. at share: reduce-scatter:
the parts that step t sends have arrived, and the means have not left.
"""

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

MOMENTS = ("first step", "inner steps", "in flight", "at apply", "checkpoint", "at share")
POLL_S = 0.01


def act_at(moment: str, t: int, act: Callable[[], None]) -> None:
    """Call `act` once, in the thread that comes to the moment. Imports JAX."""
    from maxdiloco.checkpoint import write
    from maxdiloco.engine.data_parallel import DataParallel
    from maxdiloco.engine.diloco import DiLoCo
    from maxdiloco.engine.host_transfer import HostTransfers

    act = once(act)
    if moment in ("first step", "inner steps", "in flight"):
        for trainer in (DiLoCo, DataParallel):
            before(trainer, "step", lambda _, state, batch: state.t + 1 == t, act)
    elif moment == "at apply":
        before(HostTransfers, "start", lambda _, transfer, chunks: sent_after(transfer) == t, act)
    elif moment == "at share":

        def shares(_, transfer, chunks):
            return sent_after(transfer) == t and not transfer.scatters

        before(HostTransfers, "start", shares, act)
    elif moment == "checkpoint":
        for part in ("commit", "write_part"):  # of process 0, and of the others
            before(write, part, lambda save, *rest: save.target.name == str(t), act)
    else:
        raise ValueError(f"moment {moment!r}: use one of {', '.join(MOMENTS)}")


def act_at_receive(t: int, act: Callable[[], None]) -> None:
    """Call `act` each time that the process begins to wait for chunks that step t has sent."""
    from maxdiloco.engine.transports import HostTransport

    before(HostTransport, "receive", lambda _, leg: leg.send_step == t, act)


def sent_after(transfer: Any) -> int:
    """Return the step after which a transfer was sent."""
    _, _, t, _ = transfer.key
    return t


def before(owner: Any, name: str, holds: Callable[..., bool], act: Callable[[], None]) -> None:
    """Make a function call `act` first whenever holds(*arguments)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def called(*args: Any, **options: Any) -> Any:
        if holds(*args, **options):
            act()
        return original(*args, **options)

    setattr(owner, name, called)


def once(act: Callable[[], None]) -> Callable[[], None]:
    """`act` at the first call, nothing later."""
    left = [act]

    def called() -> None:
        if left:
            left.pop()()

    return called


def wait_for_file(held: pathlib.Path, go: pathlib.Path) -> None:
    """Say by a file that this thread stands still, until another file is there."""
    held.touch()
    while not go.exists():
        time.sleep(POLL_S)
