"""Sizes with four digits."""

import pytest

from nxdpp.planning.text_table import bytes_text, rate_of, size_of


def test_sizes_have_four_digits() -> None:
    sizes = (0, 1023, 1024, 1023.7 * 2**30, 2048 * 2**50)
    assert [*map(bytes_text, sizes)] == ["0 B", "1023 B", "1.000 KiB", "1.000 TiB", "2048 PiB"]


def test_a_capital_b_is_a_byte_and_ki_a_power_of_two() -> None:
    texts = ("80GB", "75GiB", "1.5 TB", "16kB", "8Gb", 1024)
    sizes = [80 * 10**9, 75 * 2**30, 1.5 * 10**12, 16_000, 10**9, 1024]
    assert [size_of(text, "device_memory") for text in texts] == sizes
    assert [rate_of(text, "link") for text in ("50GB/s", "400Gb/s", 25e9)] == [50e9, 50e9, 25e9]


@pytest.mark.parametrize("text", ["80", "80 gb", "-1GB", "80GB/s"])
def test_another_text_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match=r"device_memory='.*' is not understood: give a number and one of B, kB"):
        size_of(text, "device_memory")


@pytest.mark.parametrize("text", ["0GB", -5, float("nan")])
def test_nothing_and_infinity_are_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        size_of(text, "device_memory")


def test_a_rate_without_a_second_is_refused() -> None:
    with pytest.raises(ValueError, match=r"link='50GB' is not understood: .*end it with /s"):
        rate_of("50GB", "link")
    with pytest.raises(ValueError, match=r"link='50G/s' is not understood"):
        rate_of("50G/s", "link")
