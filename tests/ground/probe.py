"""Register the smallest program that uses a private name as nxdpp does."""

from collections.abc import Callable

from nxdpp.ground.names import PrivateName

Probe = Callable[[], bool]
PROBES: dict[PrivateName, Probe] = {}


def probe(*names: PrivateName) -> Callable[[Probe], Probe]:
    """Make the function below the probe of ``names``. It returns whether they do what nxdpp needs."""

    def register(function: Probe) -> Probe:
        PROBES.update(dict.fromkeys(names, function))
        return function

    return register
