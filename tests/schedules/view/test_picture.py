"""Pictures of timelines."""

from xml.etree import ElementTree

import pytest

from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import simulate
from nxdpp.schedules.view.picture import svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", list(FAMILIES))
def test_one_box_for_each_action_with_its_time(name: str) -> None:
    timeline = simulate(FAMILIES[name].build(3, 4))

    picture = ElementTree.fromstring(svg({"three <ranks> & more": timeline}))

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


def test_several_timelines_have_one_scale() -> None:
    schedule = FAMILIES["1f1b"].build(2, 3)
    picture = ElementTree.fromstring(svg({"slow": simulate(schedule, 2.0), "fast": simulate(schedule, 1.0)}))

    texts = [element.text for element in picture.iter(f"{SVG}text")]
    assert texts.count("rank 1") == 2
    assert texts.index("slow") < texts.index("fast")
    boxes = [box for box in picture.iter(f"{SVG}rect") if str(box.get("class")).startswith("action f")]
    assert len({(box.attrib["y"], box.attrib["width"]) for box in boxes}) == 4
    slow, fast = sorted({float(box.attrib["width"]) for box in boxes}, reverse=True)
    assert slow == pytest.approx(2 * fast)
    assert all(float(box.attrib["y"]) < float(picture.attrib["height"]) for box in boxes)


def test_a_long_schedule_and_times_of_zero() -> None:
    long = ElementTree.fromstring(svg({"long": simulate(FAMILIES["gpipe"].build(2, 3000))}))
    assert float(long.attrib["width"]) < 21_000
    ElementTree.fromstring(svg({"none": simulate(FAMILIES["gpipe"].build(2, 2), 0, 0, 0)}))
