"""Rows of text, set in columns for a terminal."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Return a line for each row; rows that are shorter end earlier."""
    longest = max(len(row) for row in rows)
    filled = [(*row, *[""] * (longest - len(row))) for row in rows]
    widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
    return [
        indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in filled
    ]
