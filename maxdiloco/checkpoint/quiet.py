"""Keeps Orbax from logging a failed save, which the Checkpointer reports in one line.

Orbax runs the writes of a checkpoint as tasks of an event loop and closes the loop at the first
write that fails. The other writes go on, into a folder that is being removed, and print tracebacks
of tasks and of a closed loop. So the loops of this module wait for their tasks before they close.
"""

import asyncio
import logging
from typing import Any


def begin() -> asyncio.AbstractEventLoopPolicy:
    """Let loops wait for their tasks and keep Orbax from logging. Returns the argument of end().

    Orbax does not log after end() either: a thread of a save that timed out may be that late.
    """
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_Policy())
    logging.getLogger("absl").addFilter(_not_from_orbax)
    return before


def end(before: asyncio.AbstractEventLoopPolicy) -> None:
    """Restore the event loops."""
    asyncio.set_event_loop_policy(before)


class _Loop(asyncio.SelectorEventLoop):
    def close(self) -> None:
        if not self.is_closed() and (left := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        super().close()

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        # The save raises the first failure; nobody retrieves the others.
        if "never retrieved" not in context["message"]:
            super().default_exception_handler(context)


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _Loop()


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname
