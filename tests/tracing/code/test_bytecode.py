"""Bytecode, code objects and frames are known in ``tracing/code`` only: a new Python is a port of one folder."""

import ast
from pathlib import Path

TRACING = Path(__file__).parents[3] / "nxdpp/tracing"
MODULES = frozenset({"dis", "opcode", "_opcode", "bytecode"})
TYPES = frozenset({"CodeType", "FrameType"})
ATTRIBUTES = frozenset({"_getframe", "currentframe", "__code__", "gi_frame", "tb_frame", "tb_lasti", "_current_frames"})
PREFIXES = ("co_", "f_back", "f_code", "f_globals", "f_lasti", "f_lineno", "f_locals")


def uses(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [str(node.module)] if node.module in MODULES else []
            found += [alias.name for alias in node.names if alias.name in TYPES]
        elif isinstance(node, ast.Attribute):
            is_used = node.attr in ATTRIBUTES or node.attr.startswith(PREFIXES)
            found += [f"{node.attr}, line {node.lineno}"] if is_used else []
    return found


def test_only_one_folder_knows_bytecode_and_frames() -> None:
    outside = [path for path in sorted(TRACING.rglob("*.py")) if path.parent != TRACING / "code"]
    assert outside
    found = {str(path.relative_to(TRACING)): uses(path.read_text()) for path in outside}
    assert not {path: names for path, names in found.items() if names}, "ask a function of tracing/code instead"
