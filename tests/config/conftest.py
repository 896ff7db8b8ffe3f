"""What tests of the configuration share."""

import pytest

from maxdiloco.config import config
from maxdiloco.errors import ConfigError


@pytest.fixture
def refusal():
    """The line that a config is refused with; exit code 2 belongs to it."""

    def refusal(*argv, environ=()):
        with pytest.raises(ConfigError) as caught:
            config.load(argv, dict(environ), warn=print)
        line = str(caught.value)
        assert "\n" not in line and caught.value.exit_code == 2
        return line

    return refusal
