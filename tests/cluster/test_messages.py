"""Messages between messengers on a sound network: real sockets and threads inside one process."""

import gc
import os
import random
import socket
import subprocess
import sys
import threading
import time

import messenger_tools
import ml_dtypes
import numpy as np
import pytest
from messenger_tools import WAIT_S, close_all, later, meet, soon, until

from maxdiloco.cluster.channel import Channel
from maxdiloco.cluster.payloads import CONTROL, MESSAGE_BYTES, get_payload, put_payload
from maxdiloco.errors import LostPeerError


def test_a_channel_connects_those_that_open_it(network):
    """As in a run: bulk between counterparts, control to process 0."""
    zero, one, two = network.messengers(3, bulk=[{0, 2}])
    meet(zero, one, two)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("maxdiloco-messages") == 3, "one thread each"
    one.put(0, ("row", 1), [b"loss"], CONTROL)
    two.put(0, (0, 1), [b"gradient"])
    assert zero.get(1, ("row", 1), soon()) == b"loss"
    assert zero.get(2, (0, 1), soon()) == b"gradient"
    with pytest.raises(KeyError):
        one.put(0, (0, 1), [b"gradient"])


def test_put_never_waits_and_control_overtakes_bulk(network):
    """The connection of the bulk stops after 100 KB; the other one passes."""
    zero, one, proxy = network.pair()
    proxy.limit = 100_000
    before = time.monotonic()
    for number in range(20):
        one.put(0, (0, number), [bytes(MESSAGE_BYTES)])
    one.put(0, ("row", 1), [b"loss"], CONTROL)
    assert time.monotonic() - before < WAIT_S / 2
    assert zero.get(1, ("row", 1), soon()) == b"loss"
    assert not zero.has_message(1, (0, 19))
    proxy.limit = float("inf")
    assert len(zero.get(1, (0, 19), soon())) == MESSAGE_BYTES


@pytest.mark.parametrize("size", [0, 1, MESSAGE_BYTES, MESSAGE_BYTES + 1, 3 * MESSAGE_BYTES - 7])
def test_a_payload_is_several_messages_of_a_bounded_size(network, size):
    """In buffers that end inside a message. A message itself is refused if it is larger."""
    zero, one, _ = network.pair()
    data = random.Random(1).randbytes(size)
    buffers = [data[: size // 3], b"", np.frombuffer(data[size // 3 :], np.uint8)]
    put_payload(one, 0, ("fragment", 1), buffers)
    put_payload(one, 0, ("fragment", 1), [b"the next one"])
    for expected in (data, b"the next one"):
        found = get_payload(lambda key: zero.get(1, key, soon()), ("fragment", 1))
        assert found.tobytes() == expected
    with pytest.raises(ValueError, match=str(MESSAGE_BYTES + 1)):
        one.put(0, ("fragment", 2), [bytes(MESSAGE_BYTES), b"x"])


def test_what_cannot_be_sent_is_refused_where_it_is_put(network):
    zero, one, _ = network.pair()
    for key, data in (
        ((0, 1), [np.zeros(4, ml_dtypes.bfloat16)]),
        ((0, 1), [np.zeros((4, 4))[:, 1]]),
        ((0, 1), [17]),
        ((0, (1, 2)), [b""]),
        ((0, 1.5), [b""]),
        ((), [b""]),
    ):
        with pytest.raises((TypeError, ValueError)):
            zero.put(1, key, data)
    zero.put(1, (0, 1), [np.arange(2, dtype=np.int8), b"", np.zeros((0, 3))])
    assert one.get(0, (0, 1), soon()) == b"\0\1"


def test_messages_of_one_key_arrive_in_order(network):
    zero, one, _ = network.pair()
    with pytest.raises(TimeoutError, match=r"process 1 at 127.0.0.1 port \d+"):
        zero.get(1, ("row",), time.monotonic() + 0.01)
    for i in range(5):
        one.put(0, ("row",), [bytes([i])], CONTROL)
    assert [zero.get(1, ("row",), soon())[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert not zero.has_message(1, ("row",))


@pytest.mark.parametrize("leaver", [0, 1])
def test_close_sends_what_is_queued_and_the_end_is_no_error(network, leaver):
    """Of the process that is dialled, and of the one that dials."""
    pair = network.pair()
    side, other, left = pair[leaver], pair[1 - leaver], 1 - leaver
    data = random.randbytes(MESSAGE_BYTES)
    for number in range(8):
        side.put(left, (0, number), [data])
    side.put(left, ("row", 1), [b"the last"], CONTROL)
    assert side.close(WAIT_S)
    assert all(other.get(leaver, (0, number), soon()) == data for number in range(8))
    assert other.get(leaver, ("row", 1), soon()) == b"the last"
    other.put(leaver, (1, 1), [b"to nobody"])
    with pytest.raises(LostPeerError, match=rf"process {leaver} at .*\(1, 1\)"):
        other.get(leaver, (1, 1), soon())
    other.wait_until_left(WAIT_S)
    assert other.close(WAIT_S)
    for call in (
        lambda: other.put(leaver, (0, 1), [b""]),
        lambda: other.wait_until_connected(CONTROL, WAIT_S),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_close_returns_in_time_and_says_what_it_could_not_send(network):
    _, one, proxy = network.pair()
    proxy.stopped = {"to", "from"}
    one.put(0, (0, 1), [bytes(1000)])
    assert one.close(0.1) is False
    assert one.close(0.1) is False
    proxy.stopped = set()


def test_a_watched_message_arrives_even_after_a_failure(network):
    zero, one, _ = network.pair()
    heard = []
    one.subscribe("end", on_message=lambda *it: heard.append(it), on_loss=lambda *it: None)
    zero.fail(LostPeerError("process 7 is gone"))
    zero.notify(1, "end", b"why")
    until(lambda: heard == [(0, b"why")])
    assert not one.has_message(0, ("end",))


def threads_and_descriptors():
    """Numbers of live threads and of open descriptors of this process."""
    gc.collect()  # a connection that waits for the last word of TLS when the loop ends
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def require_nothing_left():
    """Open and close messengers; raise AssertionError if a thread or a descriptor is left."""
    threads, descriptors = threads_and_descriptors()
    for _ in range(2):
        with messenger_tools.Network() as network:
            zero, one, proxy = network.pair(timeout_s=20)
            client = socket.create_connection(proxy.target)
            proxy.fault = "end", 1
            one.put(0, (0, 1), [bytes(100_000)])
            zero.get(1, (0, 1), soon())
            now = threads_and_descriptors()
            assert now[0] > threads and now[1] > descriptors
            assert close_all([zero, one]) == [True, True]
            client.close()
    assert threads_and_descriptors() == (threads, descriptors)


def test_no_thread_and_no_descriptor_is_left():
    """In a process of its own, where no other test's threads open or close a descriptor."""
    program = "import test_messages; test_messages.require_nothing_left()"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=WAIT_S)


@pytest.mark.parametrize(("name", "sender"), [("receive", 1), ("receive", 0), ("record_read", 1)])
def test_any_error_of_the_thread_reaches_the_callers(network, monkeypatch, capfd, name, sender):
    """Of either side, and nothing is printed: the caller raises it."""
    pair = network.pair()

    def fail(*_):
        raise ZeroDivisionError("in the thread")

    waiting = later(lambda: pair[1 - sender].get(sender, (0, 1), soon()))
    monkeypatch.setattr(Channel, name, fail)
    pair[sender].put(1 - sender, (0, 2), [b"x"])
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        waiting.result(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        pair[1 - sender].put(sender, (0, 1), [b""])
    assert capfd.readouterr().err == ""


def test_a_messenger_needs_no_jax(started):
    code = "import sys; from maxdiloco.cluster import messages; sys.exit('jax' in sys.modules)"
    assert started(code).wait(WAIT_S) == 0
    assert "jax" in sys.modules, "the positive control: it would be seen"
