"""All families of schedules, by name."""

import re
from difflib import get_close_matches

from nxdpp.schedules.families.dualpipe_v import DUALPIPE_V
from nxdpp.schedules.families.eager_1f1b import EAGER_1F1B
from nxdpp.schedules.families.family import Family
from nxdpp.schedules.families.gpipe import GPIPE
from nxdpp.schedules.families.interleaved import INTERLEAVED
from nxdpp.schedules.families.looped_bfs import LOOPED_BFS
from nxdpp.schedules.families.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from nxdpp.schedules.families.v_half import V_HALF
from nxdpp.schedules.families.v_min import V_MIN
from nxdpp.schedules.families.zb1p import ZB1P
from nxdpp.schedules.families.zb_h1 import ZB_H1
from nxdpp.schedules.families.zb_v import ZB_V

_ALL = (
    GPIPE,
    ONE_FORWARD_ONE_BACKWARD,
    EAGER_1F1B,
    INTERLEAVED,
    LOOPED_BFS,
    ZB_H1,
    ZB1P,
    ZB_V,
    DUALPIPE_V,
    V_HALF,
    V_MIN,
)
FAMILIES = {family.name: family for family in _ALL}


def find_family(name: str) -> Family:
    """Return the family ``name``; ``ValueError`` with all names, and the closest one, for an unknown name."""
    if name not in FAMILIES:
        raise ValueError(f"there is no schedule {name!r}{_meant(name)}. Choose one of {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def _meant(name: str) -> str:
    plain = {_plain(family): family for family in FAMILIES}
    close = get_close_matches(_plain(name), plain, 1)
    return f" (did you mean {plain[close[0]]!r}?)" if close else ""


def _plain(name: str) -> str:
    """Lower-case letters and digits of ``name``."""
    return re.sub("[^a-z0-9]", "", name.lower())
