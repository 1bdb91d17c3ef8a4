"""Text of a plan for the command: its tables, and how to run its first layout."""

from collections.abc import Iterator, Sequence

from nxdpp.planning.plan import Plan
from nxdpp.planning.text_table import paragraph
from nxdpp.planning.written.plan_text import columns, layouts_table, left_out, ranks_table, sent_table


def show(plan: Plan, dtype: str, source: str, file: str, details: bool = False, notes: Sequence[str] = ()) -> None:
    """Print the layouts of ``plan``, the best first, then the command and the program of the first one.

    Args:
        plan: the plan.
        dtype: sentence about the dtype.
        source: the program; empty where ``file`` has it.
        file: its name in the command.
        details: print a second table.
        notes: sentences below the tables.
    """
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in plan.sample.items())
    print(paragraph(plan.title))
    print(plan.size)
    print(paragraph(f"dtype: {dtype}"))
    print(paragraph(f"optimizer, in all layouts: {_optimizer(plan)}"))
    print(paragraph(f"microbatch of one sample: {shapes}"))
    print()
    print("\n".join(layouts_table(plan.best)))
    if details or len(plan.best) == 1:
        print()
        print("\n".join(ranks_table(plan.first)))
    if details:
        print()
        print("\n".join(sent_table(plan.best)))
    written = "--write train.py: the program below; --write plan.json: for NxDPPModel.from_plan(model, plan)"
    for line in (*notes, *_below(plan, details), written if source else "The program is written. Its start:"):
        print(paragraph(line))
    # Lines to copy must not be broken.
    print(f"\n{plan.torchrun(file)}")
    if source:
        print(f"\n{source}", end="")


def _optimizer(plan: Plan) -> str:
    if plan.has_masters:
        gradients = "" if plan.gradient_dtype is None else f"; gradients add up in {plan.gradient_dtype}"
        return f"AdamW, with moments and copies of the weights in float32 (--zero 0: without){gradients}"
    half = "" if plan.optimizer_dtype == "float32" else ", no float32 copies of the weights: small updates are lost"
    return f"AdamW, with moments in {plan.optimizer_dtype}{half}"


def _below(plan: Plan, details: bool) -> Iterator[str]:
    yield from columns(plan.best)
    if details or len(plan.best) == 1:
        yield "memory of a rank: with flat copies, communicators and messages"
    if details:
        yield "sent: bytes of a step, of the rank with the most"
    yield from left_out(plan.too_large, plan.device_memory, plan.refused or {})
    if not details:
        yield "--details: parts of the step's time, and sent bytes; --json: all numbers"
