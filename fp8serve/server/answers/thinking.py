"""Reasoning between two marks before the answer."""

from collections.abc import Generator, Sequence

from fp8serve.server.answers.feed import Content, Feed, Reader, Reading, Reasoning, skip, until


def between(openings: Sequence[str], closings: Sequence[str], opened: bool = False) -> Reader:
    """A reader of reasoning that begins with one of `openings`. `opened`: the prompt ends with one.

    Without an opening everything is content; without a closing everything is reasoning. White space around reasoning is
    left out.
    """

    def read(feed: Feed) -> Reading:
        if (yield from _begins(feed, openings)) or opened:
            yield from skip(feed)
            yield from until(feed, Reasoning, closings)
            yield from skip(feed)
        yield from until(feed, Content, ())

    return read


def _begins(feed: Feed, openings: Sequence[str]) -> Generator[None, None, bool]:
    """Takes one of `openings`, and the white space before it, if it is next."""
    feed.unread = Content, ()
    while not feed.ended and any(
        len(feed.text.lstrip()) < len(o) and o.startswith(feed.text.lstrip()) for o in openings
    ):
        yield None
    feed.unread = None
    for opening in openings:
        if feed.text.lstrip().startswith(opening):
            feed.text = feed.text.lstrip()[len(opening) :]
            return True
    return False


def _may_begin(text: str, openings: Sequence[str]) -> bool:
    return any(len(text) < len(opening) and opening.startswith(text) for opening in openings)
