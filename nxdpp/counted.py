"""A number with its noun, as messages say it: 1 rank, 2 ranks; and the refusal of a number."""


def counted(number: int, one: str, several: str = "") -> str:
    """Return ``number`` with ``one`` where it is 1, else with its plural, or with ``several``.

    A verb may follow the noun: ``counted(1, "row is", "rows are")`` is "1 row is".
    """
    plural = several or one + ("es" if one.endswith(("ch", "s")) else "s")
    return f"{number:,} {one if number == 1 else plural}"


def check_whole(name: str, value: object) -> None:
    """Raise ``ValueError`` for a ``value`` of the argument ``name`` that is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
