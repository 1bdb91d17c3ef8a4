"""Note on an error in the forward of a stage: the line of the model's code that raised it.

The stage runs code that ``torch.fx`` has generated. The trace has kept the model's line of each of its nodes.
"""

import traceback

from torch import fx

from nxdpp.tracing.graph.errors import model_line


def note_line(error: Exception, module: fx.GraphModule) -> None:
    """Add a note to ``error`` with the innermost line of the model's code, if the graph of ``module`` raised it."""
    run = type(module).forward.__code__
    frames = list(traceback.walk_tb(error.__traceback__))
    generated = [(at, line) for at, (frame, line) in enumerate(frames) if frame.f_code is run]
    if not generated:
        return
    at, line = generated[0]
    # A line of the code begins with the name of its node.
    name = module.code.splitlines()[line - 1].split()[0]
    stack = [node.stack_trace or "" for node in module.graph.nodes if node.name == name]
    for frame, number in frames[at + 1 :]:
        # Generated code has no name of a module.
        if frame.f_globals.get("__name__", "nxdpp").partition(".")[0] != "nxdpp":
            stack.append(f'File "{frame.f_code.co_filename}", line {number}, in {frame.f_code.co_name}')
    if any(stack):
        error.add_note(f"in the model: {model_line(chr(10).join(stack))}")
