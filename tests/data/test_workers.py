"""Processes that make parts: every call once, an error and a loss told."""

import os
import time

import pytest

from maxdiloco.data.prepared.workers import map_parts
from maxdiloco.errors import DataError, LostPeerError


def sleep(seconds):
    time.sleep(seconds)
    return seconds


def refuse(number):
    raise DataError(f"number {number} is no text")


def test_a_process_that_has_ended_for_want_of_calls_is_not_lost():
    """The other one works for two seconds more."""
    found = list(map_parts(sleep, (), [(0,), (2,)], 2))
    assert found == [(0, 0), (1, 2)]


def test_an_error_of_a_call_ends_them_all():
    """One line, as in this process."""
    with pytest.raises(DataError, match="number 3 is no text"):
        list(map_parts(refuse, (), [(3,)], 1))


def test_a_process_that_is_gone_is_told():
    """Killed, or out of memory: the same command goes on."""
    with pytest.raises(LostPeerError, match=r"is gone \(exit code 7\).*The same command goes on"):
        list(map_parts(os._exit, (), [(7,)], 1))
