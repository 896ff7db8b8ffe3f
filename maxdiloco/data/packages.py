"""Import of optional packages where they are needed."""

import importlib
import types

from maxdiloco.errors import ConfigError


def require(name: str, user: str, *, extra: str, otherwise: str = "") -> types.ModuleType:
    """Import a module of an optional package.

    Args:
      name: the module.
      user: what needs it, for the message.
      extra: the extra of setup.py that has it.
      otherwise: the end of the message.

    Raises:
      ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{user} needs the package {package}, which cannot be imported ({error}): pip install "
            f"-e '.[{extra}]' in a checkout of maxdiloco{otherwise}."
        ) from error
