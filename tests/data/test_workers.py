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


def test_every_call_is_made_once_and_an_error_and_a_loss_are_told():
    """A process that has ended for want of calls is not lost: the other one works for two seconds
    more. One that is killed, or out of memory, is: the same command goes on."""
    assert list(map_parts(sleep, (), [(0,), (2,)], 2)) == [(0, 0), (1, 2)]
    with pytest.raises(DataError, match="number 3 is no text"):
        list(map_parts(refuse, (), [(3,)], 1))
    with pytest.raises(LostPeerError, match=r"is gone \(exit code 7\).*The same command goes on"):
        list(map_parts(os._exit, (), [(7,)], 1))
