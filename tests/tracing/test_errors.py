"""The line of an error is one of the model, not of the machinery."""

from nxdpp.tracing.errors import source_line


def _fails(value: object) -> None:
    raise KeyError(value)


def test_the_innermost_line_of_the_model() -> None:
    try:
        _fails(3)
    except KeyError as error:
        line = source_line(error.__traceback__)
    assert line.startswith(f"{__file__}:")
    assert line.endswith("in _fails: raise KeyError(value)")


def test_without_a_line_of_the_model() -> None:
    assert source_line(None) == "an unknown place"
