"""Lists in OpenAI's shape, a page at a time."""

from typing import Any


def page(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
    return {"object": "list", "data": items, "has_more": has_more} | ends
