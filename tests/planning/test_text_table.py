"""Sizes with four digits."""

import pytest

from nxdpp.planning.text_table import bytes_text, rate_of, size_of


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.000 KiB"),
        (48.835 * 2**30, "48.84 GiB"),
        (176 * 2**30, "176.0 GiB"),
        (1023 * 2**30, "1023 GiB"),
        (1023.7 * 2**30, "1.000 TiB"),
        (5.906 * 2**40, "5.906 TiB"),
        (2048 * 2**50, "2048 PiB"),
    ],
)
def test_sizes_have_four_digits(size: float, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("75GiB", 75 * 2**30),
        ("1.5 TB", 1.5 * 10**12),
        ("512MiB", 2**29),
        ("16kB", 16_000),
        ("8Gb", 10**9),
        (1024, 1024),
    ],
)
def test_a_capital_b_is_a_byte_and_ki_a_power_of_two(text: str | int, size: float) -> None:
    assert size_of(text, "device_memory") == size


@pytest.mark.parametrize(("text", "rate"), [("50GB/s", 50e9), ("400Gb/s", 50e9), ("1 GiB/s", 2**30), (25e9, 25e9)])
def test_a_rate_ends_with_a_second(text: str | float, rate: float) -> None:
    assert rate_of(text, "link") == rate


@pytest.mark.parametrize("text", ["80", "80 gb", "GB", "-1GB", "80GB/s", "1e3GB", "", "infGB"])
def test_another_text_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match=r"device_memory='.*' is not understood: give a number and one of B, kB"):
        size_of(text, "device_memory")


@pytest.mark.parametrize("text", ["0GB", 0, -5, float("inf"), float("nan")])
def test_nothing_and_infinity_are_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        size_of(text, "device_memory")


def test_a_rate_without_a_second_is_refused() -> None:
    with pytest.raises(ValueError, match=r"link='50GB' is no rate: end it with /s"):
        rate_of("50GB", "link")
    with pytest.raises(ValueError, match=r"link='50G/s' is not understood"):
        rate_of("50G/s", "link")
