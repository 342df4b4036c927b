"""Texts of a bounded length."""

_ELLIPSIS = "…"


def clip(text: str, most_bytes: int) -> str:
    """Returns the text, cut so that it has at most so many bytes of UTF-8, its ellipsis included.

    What UTF-8 cannot say becomes a question mark.
    """
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return data.decode()
    return data[: most_bytes - len(_ELLIPSIS.encode())].decode(errors="ignore") + _ELLIPSIS
