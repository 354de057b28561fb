"""gpt-oss's messages: a header that names a channel and perhaps a recipient, then a body.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{...}<|call|>

The channel `analysis` is reasoning, a message addressed to a function is a call, and everything else is content.
"""

import re

from fp8serve.server.answers.feed import Arguments, Call, Content, Feed, Reading, Reasoning, accept, collect, until

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def harmony(feed: Feed) -> Reading:
    """The prompt ends with `<|start|>assistant`, so the first header is without it."""
    mark = " to=" if (yield from accept(feed, " to=")) else ""
    while True:
        if mark not in (START, CHANNEL, " to="):
            mark = yield from until(feed, Content, (START, CHANNEL))
            if not mark:
                return
        head, end = yield from collect(feed, (MESSAGE,))
        head = mark + head
        if not end:
            yield Content(head)
            return
        if recipient := _RECIPIENT.search(head):
            yield Call(recipient[1])
        part = Arguments if recipient else Reasoning if "analysis" in head else Content
        mark = yield from until(feed, part, (*ENDS, START, CHANNEL))
