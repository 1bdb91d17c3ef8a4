"""The private names that XLA devices need; the other tests of this folder use them."""

import pytest

from nxdpp.ground import xla_names
from nxdpp.ground.names import PrivateName

NAMES = [each for each in vars(xla_names).values() if isinstance(each, PrivateName)]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_the_installed_version_has_the_name(name: PrivateName) -> None:
    assert callable(name.found), f"{name.path} has gone; with it nxdpp {name.use}"
