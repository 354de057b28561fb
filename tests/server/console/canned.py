"""Prepared answers that the page gets in place of the server's."""

import json
from typing import Any

from tests.server.console.browser import Browser

REPLACE_FETCH = """
const [path, text, type] = arguments;
window.originalFetch ??= fetch;
window.bodies = [];
window.canned = { ...window.canned, [path]: [text, type] };
window.fetch = (url, options = {}) => {
  const match = Object.entries(window.canned).find(([path]) => new URL(url, location).pathname.endsWith(path));
  if (!match) return window.originalFetch(url, options);
  if (options.body) window.bodies.push(JSON.parse(options.body));
  return Promise.resolve(new Response(match[1][0], { headers: { "Content-Type": match[1][1] } }));
};
"""

NO_HISTORY = {"weight_version": "base-0", "layer": "of nobody", "entries": []}
"""An answer of /scales/history for layers that the server behind the page does not have."""


def answer_with(browser: Browser, path: str, value: Any) -> None:
    """From now on the open page gets `value` for requests to `path`: JSON, a text, or a list of chunks as a stream."""
    if isinstance(value, str):
        browser.run(REPLACE_FETCH, path, value, "text/plain")
    elif isinstance(value, list):
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in value) + "data: [DONE]\n\n"
        browser.run(REPLACE_FETCH, path, text, "text/event-stream")
    else:
        browser.run(REPLACE_FETCH, path, json.dumps(value), "application/json")


def chunk(finish: str | None = None, logprobs: list[Any] | None = None, **delta: Any) -> dict[str, Any]:
    """One piece of a stream of /v1/chat/completions."""
    content = None if logprobs is None else {"content": logprobs, "refusal": None}
    choice = {"index": 0, "delta": delta, "logprobs": content, "finish_reason": finish}
    return {"model": "tiny", "system_fingerprint": "base-0", "choices": [choice]}


def token(text: bytes, logprob: float, *others: tuple[str, float]) -> dict[str, Any]:
    """Returns a token of a piece's log-probabilities. others: its alternatives, with their log-probabilities."""
    try:
        name = text.decode()
    except UnicodeDecodeError:
        name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
    top = [{"token": word, "logprob": value, "bytes": list(word.encode())} for word, value in others]
    return {"token": name, "logprob": logprob, "bytes": list(text), "top_logprobs": top}


def layer(name: str, **numbers: Any) -> dict[str, Any]:
    """One record of /scales without anything notable, except for `numbers`."""
    calm = {
        "name": name, "input": "stored", "amax": 10.0, "scale": 20.0, "headroom": 2.24, "saturated": 0,
        "saturation": 0.0, "calibrated_amax": 12.0, "window_amax": 9.0, "window_saturation": 0.0, "drift": 0.75,
        "drifts": False,
    }  # fmt: skip
    return calm | numbers
