"""Everything that the command knows of a given layout, for its text and its JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nxdpp.pipeline.planning.layout_options import LayoutOptions
from nxdpp.pipeline.planning.rank_summary import LayoutSummary

_HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class LayoutResult:
    """A layout of a model.

    Attributes:
        model: name of the model's class.
        parameters: number of its parameters, each once.
        dtype: of its parameters.
        named_dtype: the one that the configuration names; ``None`` where it names none.
        inputs: shapes of a microbatch by name.
        options: the given layout.
        layout: its ranks and stages.
        notes: sentences about the figures.
    """

    model: str
    parameters: int
    dtype: str
    named_dtype: str | None
    inputs: Mapping[str, Sequence[int]]
    options: LayoutOptions
    layout: LayoutSummary
    notes: list[str] = field(default_factory=list)

    @property
    def has_dimensions(self) -> bool:
        """True with tensor groups or replicas."""
        return self.options.sizes.tensor > 1 or self.options.sizes.data > 1

    @property
    def dtype_text(self) -> str:
        """The dtype, the construction that gives it, and the flag for another."""
        return dtype_text(self.model, self.dtype, self.options.dtype, self.named_dtype)

    @property
    def state_dtype(self) -> str:
        """Dtype of the optimizer's moments."""
        return "float32" if self.has_masters else self.dtype

    @property
    def has_masters(self) -> bool:
        """True if the optimizer keeps float32 master weights."""
        return self.options.sizes.zero1 and self.dtype in _HALF

    @property
    def optimizer_text(self) -> str:
        """The optimizer and its state."""
        masters = " and master weights" if self.has_masters else ""
        text = f"two moments{masters} of {self.state_dtype} a parameter"
        if self.options.sizes.zero1:
            replicas = self.options.sizes.data
            return f"Zero1Optimizer over AdamW, {text}, divided over {replicas} replica{'s' if replicas > 1 else ''}"
        return f"AdamW, {text}" + (", no float32 master weights" if self.dtype in _HALF else "")


def dtype_text(model: str, dtype: str, given: str | None, named: str | None) -> str:
    """Return the dtype of a plan, the construction that gives it, and the flag for another.

    Args:
        model: name of the model's class.
        dtype: of its parameters.
        given: value of ``--dtype``, or ``None``.
        named: dtype of the configuration, or ``None``.
    """
    if given is not None:
        return f"{dtype}, by --dtype: {model}(config).to(torch.{dtype})"
    text = f"{dtype}, as {model}(config) makes it"
    if named in (None, dtype):
        return f"{text}; --dtype plans for another"
    return f"{text}. The configuration names {named}, which its constructor does not read: --dtype {named} plans for it"
