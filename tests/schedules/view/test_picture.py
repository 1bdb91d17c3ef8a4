"""The timeline as a picture."""

from xml.etree import ElementTree

import pytest

from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import simulate
from nxdpp.schedules.view.picture import svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_box_an_action_with_its_time(name: str) -> None:
    timeline = simulate(FAMILIES[name].build(3, 4))

    picture = ElementTree.fromstring(svg(timeline, "three <ranks> & more"))

    titles = [element.text for element in picture.iter(f"{SVG}title")]
    assert titles == [f"{s.action}, {s.start:.6g} to {s.end:.6g}" for spans in timeline.spans for s in spans]
    texts = [element.text for element in picture.iter(f"{SVG}text")]
    assert {"three <ranks> & more", "rank 0", "rank 1", "rank 2", "F forward", "bubble"} <= set(texts)
    assert {"F3", "f3"} & set(texts)
    assert {
        f"bubble {100 * i:.1f} %, peak {p:g}" for i, p in zip(timeline.bubbles, timeline.peaks, strict=True)
    } <= set(texts)
    width = float(picture.attrib["width"])
    for box in picture.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.attrib["width"]) <= width


def test_a_long_schedule_and_one_of_no_time() -> None:
    long = ElementTree.fromstring(svg(simulate(FAMILIES["gpipe"].build(2, 3000)), "long"))
    assert float(long.attrib["width"]) < 21_000
    ElementTree.fromstring(svg(simulate(FAMILIES["gpipe"].build(2, 2), 0, 0, 0), "none"))
