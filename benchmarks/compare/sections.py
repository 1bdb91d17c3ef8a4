"""The sections of the comparison, by name."""

from collections.abc import Callable

from benchmarks.compare import efficiency, llama, memory, overhead
from benchmarks.compare.rows import Row
from benchmarks.compare.session import Effort

SECTIONS: dict[str, Callable[[Effort, Callable[[str], None]], list[Row]]] = {
    "efficiency": efficiency.measure,
    "overhead": overhead.measure,
    "llama": llama.measure,
    "memory": memory.measure,
}


def run_section(name: str, effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """The rows of a section; ``say`` is told what begins."""
    return SECTIONS[name](effort, say)
