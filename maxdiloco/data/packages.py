"""Import optional packages on first use, with an error that names the extra to install."""

import importlib
import types

from maxdiloco.errors import ConfigError


def require(name: str, user: str, *, extra: str, otherwise: str = "") -> types.ModuleType:
    """Import a module of an optional package.

    Args:
      name: the module.
      user: the feature that needs the module, such as a key and its value, for the message.
      extra: the extra of setup.py that installs the package.
      otherwise: text at the end of the message, such as an alternative.

    Raises:
      ConfigError: the module cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{user} needs the package {package}, which cannot be imported ({error}): pip install "
            f"-e '.[{extra}]' in a checkout of maxdiloco{otherwise}."
        ) from error
