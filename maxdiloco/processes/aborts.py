"""The one way found to keep JAX from ending a process before its watch does."""

import ctypes
import signal


def delay() -> None:
    """Let an abort of JAX wait 6 s, in which the watch names the lost peer and ends the process.

    Within 0.04 s of the end of process 0 a C++ thread of JAX in every other process logs
    "Terminating process", within 0.4 s it has called abort(): exit code 134 and no name.
    The handler of SIGABRT installed here is libc's `sleep`: it is called with the number of the
    signal, 6, which it takes for seconds. It runs in the aborting thread and needs no Python.

    Tried instead, with jax 0.10.2:
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))
