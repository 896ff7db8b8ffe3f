"""The delay of JAX's own abort, so that the watch can end the process first."""

import ctypes
import signal


def delay() -> None:
    """Make an abort of this process wait for 6 s.

    When process 0 dies, a C++ thread of JAX in every other process logs "Terminating process"
    0.01 to 0.04 s later and calls abort() after 0.1 to 0.4 s: exit code 134, and no name. No
    heartbeat timeout postpones it. The handler of SIGABRT is therefore libc's `sleep`: it is
    called with the signal's number, 6, and takes it for seconds. It needs neither Python nor the
    GIL. Then the abort goes on. The stack that is logged before cannot be turned off: a fatal line
    passes every level of TF_CPP_MIN_LOG_LEVEL. The watch announces it.

    What else was tried, with jax 0.10.2:
    * No handler; the thread that sees the connection close ends the process at once. In time for
      60 of 60 kills while the main thread slept or ran Python, with JAX's log as the last line in
      4; for 7 of 15 while C code held the GIL, as it does up to 0.4 s at a time in a compilation.
      With the handler: 44 of 44, the 10 that held the GIL included.
    * missed_heartbeat_callback of jaxlib's client: std::bad_cast, then the same abort, since its
      argument, an absl::Status, has no Python type.
    * heartbeat_timeout_seconds, jax_enable_recoverability, multihost_utils.live_devices: the same
      abort after 0.2 s.
    * For SIGABRT a handler in Python, set_wakeup_fd, SIG_IGN, pthread_sigmask, faulthandler: abort
      ends the process when the C handler has returned, and unblocks the signal before.
    * A parent process that turns 134 into 5: Ctrl-C on a terminal reaches the trainer twice, which
      means "quit now"; kill -9 of the parent leaves the trainer running with the devices.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))
