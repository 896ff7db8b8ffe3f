"""Packages that not every installation has, imported where they are needed."""

import importlib
import types

from maxdiloco.errors import ConfigError


def require(name: str, user: str, *, extra: str, otherwise: str = "") -> types.ModuleType:
    """A module of a package. Raises ConfigError where it cannot be imported. user: what needs it.
    extra: of setup.py that has it. otherwise: the end of the message."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{user} needs the package {package}, which cannot be imported ({error}): pip install "
            f"-e '.[{extra}]' in a checkout of maxdiloco{otherwise}."
        ) from error
