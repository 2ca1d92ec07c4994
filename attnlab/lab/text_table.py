"""Text for people: counted nouns."""


def counted(count: int, noun: str) -> str:
    """A number with its noun, which has a plural in s.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
