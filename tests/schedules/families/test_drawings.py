"""Comparison of the drawings in the docstrings with the schedules."""

import importlib

import pytest

from nxdpp.schedules.families import forward_only
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.placement import Placement
from tests.schedules.families.drawings import drawing

# Name, module, ranks, microbatches, slots of a block, transfer.
DRAWN = [
    ("gpipe", "gpipe", 4, 4, 25, 0),
    ("looped-bfs", "looped_bfs", 2, 4, 30, 0),
    ("1f1b", "one_forward_one_backward", 4, 8, 35, 0),
    ("1f1b-eager", "eager_1f1b", 4, 8, 30, 1),
    ("interleaved", "interleaved", 2, 4, 30, 0),
    ("zb-h1", "zb_h1", 4, 8, 30, 0),
    ("zb1p", "zb1p", 2, 4, 30, 0),
    ("zb-v", "zb_v", 4, 8, 30, 0),
    ("dualpipe-v", "dualpipe_v", 4, 8, 30, 0),
    ("v-half", "v_half", 4, 8, 30, 0),
    ("v-min", "v_min", 4, 8, 30, 0),
]


@pytest.mark.parametrize(("name", "module", "ranks", "microbatches", "slots", "transfer"), DRAWN)
def test_drawing_of_a_family(name: str, module: str, ranks: int, microbatches: int, slots: int, transfer: int) -> None:
    text = importlib.import_module(f"nxdpp.schedules.families.{module}").__doc__

    assert drawing(FAMILIES[name].build(ranks, microbatches), slots, transfer) in str(text)


@pytest.mark.parametrize(("placement", "microbatches"), [(Placement(2, 2), 4), (Placement(3, 2, v_shaped=True), 5)])
def test_drawings_of_forward_only(placement: Placement, microbatches: int) -> None:
    assert drawing(forward_only.forward_only(placement, microbatches), 30) in str(forward_only.__doc__)
