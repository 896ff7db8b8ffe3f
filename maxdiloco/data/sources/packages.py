"""Packages of the extra `data`, imported where a source needs them."""

import importlib
import types

from maxdiloco.errors import ConfigError


def require(name: str, why: str) -> types.ModuleType:
    """A module of a package that not every installation has.

    why: the begin of the message. Raises ConfigError that names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{why}, which needs the package {package} ({error}). Install it: pip install "
            "-e '.[data]' in a checkout of maxdiloco."
        ) from error
