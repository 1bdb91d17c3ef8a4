"""Names from files in the form in which a message shows them: escaped, and cut."""

_LONGEST = 150


def printable(text: object, longest: int = _LONGEST) -> str:
    """Return ``text`` with escapes for control characters and the like, and with at most ``longest`` characters."""
    whole = str(text)
    start = whole[:longest]
    shown = start if start.isprintable() else start.encode("unicode_escape").decode()
    return shown if len(whole) <= longest else f"{shown}... ({len(whole):,} characters)"
