"""The line in an error is a line of the model."""

from nxdpp.tracing.graph.errors import calling_line, model_line, source_line


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


def test_the_line_that_is_running() -> None:
    line = model_line(calling_line())
    assert line.startswith(f"{__file__}:")
    assert line.endswith("in test_the_line_that_is_running: line = model_line(calling_line())")


def test_of_a_stack_the_innermost_line_of_the_model() -> None:
    inner = 'File "/somewhere/torch/fx/proxy.py", line 3, in create_proxy'
    assert model_line(f"{calling_line()}\n    line\n{inner}\n    code") != "an unknown place"
    assert model_line(inner) == model_line(None) == "an unknown place"
