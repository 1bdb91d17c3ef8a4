"""Traceback of an error in a model's forward, without the frames between the program's call and the model's code.

::

    train.py:20    model.run_train(...)                    kept
    nxdpp/...      nine frames                             left out
    <eval_with_key>.7    the generated code of a stage     left out: a note has the model's line
    model.py:31    Layer.forward                           kept
"""

from collections.abc import Iterator
from types import TracebackType

_GENERATED = "<eval_with_key>"


def fold(error: BaseException) -> None:
    """Leave the frames of nxdpp out of the traceback of ``error``, if code of a model raised it."""
    traces = list(_traces(error.__traceback__))
    # A graph of torch.fx may be the program's own.
    is_of_stage = any(map(_is_generated, traces)) and any(map(_is_of_nxdpp, traces))
    if not is_of_stage or _is_of_nxdpp(traces[-1]):
        return
    kept = [trace for trace in traces if not _is_of_nxdpp(trace) and not _is_generated(trace)]
    folded = None
    for trace in reversed(kept):
        folded = TracebackType(folded, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    error.__traceback__ = folded
    # The place in the pipeline stays the last line.
    notes = [f"nxdpp: {len(traces) - len(kept)} frames of nxdpp are left out of the traceback."]
    error.__notes__ = notes + getattr(error, "__notes__", [])


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_generated(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_GENERATED)


def _is_of_nxdpp(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == "nxdpp"
