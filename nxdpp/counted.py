"""A number with its noun, as messages say it: 1 rank, 2 ranks."""


def counted(number: int, one: str, several: str = "") -> str:
    """Return ``number`` with ``one`` where it is 1, else with its plural, or with ``several``.

    A verb may follow the noun: ``counted(1, "row is", "rows are")`` is "1 row is".
    """
    plural = several or one + ("es" if one.endswith(("ch", "s")) else "s")
    return f"{number:,} {one if number == 1 else plural}"
