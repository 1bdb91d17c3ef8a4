"""Results between two marks of a Markdown page, which a benchmark writes anew."""

from pathlib import Path


def replace_block(text: str, name: str, content: str) -> str:
    """Return ``text`` with ``content`` between the marks of ``name``.

    Raises ``ValueError`` for a page without both marks, once each.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page must have {begin.strip()} and, after it, {end.strip()}, each on a line of its own")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{content.strip()}\n{end}{rest.partition(end)[2]}"


def write_blocks(page: Path, blocks: dict[str, str]) -> None:
    """Write each of ``blocks`` between its marks in ``page``, or raise as ``replace_block`` does and write nothing."""
    text = page.read_text()
    for name, content in blocks.items():
        text = replace_block(text, name, content)
    page.write_text(text)
