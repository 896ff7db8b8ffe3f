"""Errors that a user can resolve, each with the exit code of the program."""

CRASHED = 1  # Python's exit code after an error that nobody expected
INTERRUPTED = 130  # after Ctrl-C


class ConfigError(ValueError):
    """A key has an invalid value, or keys cannot be combined: exit code 2."""

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
    """Another process of the run is lost: exit code 5, or the exit code of that process."""

    exit_code = 5

    def __init__(self, line: str, exit_code: int = exit_code) -> None:
        """Keep the message and the exit code of this process."""
        super().__init__(line)
        self.exit_code = exit_code


class SaveError(RuntimeError):
    """Two saves have failed; a later start may succeed: exit code 75."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class Preempted(Exception):
    """SIGTERM arrived and the state was saved: exit code 143."""

    exit_code = 143


# Errors that a program reports as one line, with the exit code of the error.
USER_ERRORS = (
    CheckpointError, ConfigError, DataError, LostPeerError, NumericsError, Preempted, SaveError
)  # fmt: skip
# If a process exits with one of these codes, its peers exit with the same code. A restart helps
# only after a SaveError. If a process exits with another code, its peers raise LostPeerError.
SHARED_CODES = tuple(
    error.exit_code for error in (ConfigError, DataError, NumericsError, SaveError)
)
