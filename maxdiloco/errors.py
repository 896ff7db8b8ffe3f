"""Errors a user can act on, each with the exit code the command line ends with."""

CRASHED = 1  # Python's exit code after an error that nobody expected
INTERRUPTED = 130  # after Ctrl-C


class ConfigError(ValueError):
    """A key has a value that cannot work: exit code 2."""

    exit_code = 2


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used by this run: exit code 2."""

    exit_code = 2


class DataError(ValueError):
    """The data set is missing, empty or too small: exit code 3."""

    exit_code = 3


class NumericsError(ArithmeticError):
    """A loss or an outer gradient is not finite: exit code 4."""

    exit_code = 4


class LostPeerError(RuntimeError):
    """Another process of the run is gone: exit code 5, or the code that it ended with."""

    exit_code = 5

    def __init__(self, line: str, exit_code: int = exit_code) -> None:
        super().__init__(line)
        self.exit_code = exit_code


class SaveError(RuntimeError):
    """Two saves have failed; a later start may succeed: exit code 75."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class Preempted(Exception):
    """SIGTERM arrived and the state was saved: exit code 143."""

    exit_code = 143


# One line each, and the exit code of the error.
USER_ERRORS = (
    CheckpointError, ConfigError, DataError, LostPeerError, NumericsError, Preempted, SaveError
)  # fmt: skip
# When a process ends with one of these, its peers do too: a restart helps after a SaveError only.
# The end of a peer with any other code is a LostPeerError.
SHARED_CODES = tuple(
    error.exit_code for error in (ConfigError, DataError, NumericsError, SaveError)
)
