"""Search for tags in a text that is still growing."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["find_tag"]


def find_tag(text: str, tags: Sequence[str], *, final: bool = False) -> tuple[int, str | None]:
    """Position of the first tag, and the tag. All tags begin with `<`.

    If the text ends with what may become a tag, its position comes without a tag. Without either it is the text's
    length. With `final` the text does not go on, so that only whole tags count.
    """
    at = text.find("<")
    while at >= 0:
        for tag in tags:
            if text.startswith(tag, at):
                return at, tag
        if not final and any(tag.startswith(text[at : at + len(tag)]) for tag in tags):
            return at, None
        at = text.find("<", at + 1)
    return len(text), None
