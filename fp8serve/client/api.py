"""A server as its client sees it: JSON, uploads and event streams; ours, or any other that has OpenAI's routes.

Every failure is a ServerError of one sentence: there is no server, the URL or the key is wrong, the server refuses
(then in its own words), or it breaks off. Proxies from the environment are used, as in other programs, but not for this
machine.
"""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from fp8serve.errors import DataError, RequestError, ServerError, one_line, shown
from fp8serve.options import http_address

if TYPE_CHECKING:
    from httpx2 import Response, ServerSentEvent

CONNECT_SECONDS = 10.0
SILENT_SECONDS = 600.0  # with a long prompt on a slow machine nothing arrives for minutes
LOCAL = ("localhost", "127.0.0.1", "::1")
KEY_HINT = "give the right one with --api-key-file or in FP8SERVE_API_KEY"


class Api:
    """One server. `url` with or without /v1. RequestError for an invalid URL or key."""

    def __init__(self, url: str, key: str | None = None) -> None:
        import httpx2

        self.url = base_url(url)
        self._client = httpx2.Client(**client_options(self.url, key))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def get(self, path: str, **query: str | int) -> Any:
        """The JSON that GET answers."""
        with failures(self.url):
            return answered(self._client.get(self.url + path, params=query))

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON that POST answers."""
        with failures(self.url):
            return answered(self._client.post(self.url + path, content=as_json(body), headers=JSON))

    def delete(self, path: str) -> Any:
        """The JSON that DELETE answers."""
        with failures(self.url):
            return answered(self._client.delete(self.url + path))

    def upload(self, file: Path) -> str:
        """The id under which the server keeps a file of training data. DataError: it cannot be read."""
        try:
            with file.open("rb") as data, failures(self.url):
                form: dict[str, Any] = {"files": {"file": (file.name, data)}, "data": {"purpose": "fine-tune"}}
                stored = answered(self._client.post(f"{self.url}/v1/files", **form))
        except OSError as problem:
            raise DataError(f"{file} cannot be read: {problem.strerror or problem}.") from None
        return member(stored, "id", "file")

    def events(self, path: str, body: Any = None) -> Iterator["ServerSentEvent"]:
        """The events in the answer to a GET, or to a POST of `body`, as they come."""
        options: dict[str, Any] = {} if body is None else {"method": "POST", "content": as_json(body), "headers": JSON}
        with failures(self.url), self._client.sse(self.url + path, **options) as source:
            if source.response.status_code != 200:
                source.response.read()
                raise refusal(source.response)
            yield from source

    def objects(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream in OpenAI's form, which ends with [DONE]."""
        with closing(self.events(path, body)) as events:  # type: ignore[type-var]  # a generator
            for event in events:
                if event.data == "[DONE]":
                    return
                yield event_object(event)

    def first_model(self) -> str:
        """The name of the model that the server names first."""
        names = model_names(self.get("/v1/models"))
        if not names:
            raise ServerError(f"The server at {self.url} serves no model now; wait until it has loaded one.")
        return names[0]


# -- what the asynchronous client of `bench serve` needs as well -------------------------------------------------------

JSON = {"Content-Type": "application/json"}


def base_url(url: str) -> str:
    """`url` without /v1 and slashes at its end. RequestError when it cannot be a server's."""
    parts = http_address(url.strip())
    if parts is None or parts.query or parts.fragment:
        raise RequestError(f"{shown(url)} is not the URL of a server; give one such as http://127.0.0.1:8000.")
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def client_options(url: str, key: str | None) -> dict[str, Any]:
    """Keyword arguments of httpx2's clients. RequestError for a key that no header can carry."""
    import httpx2

    if key is not None and not (key.isascii() and key.isprintable() and key):
        raise RequestError("The API key holds characters that no header can carry; it must be printable ASCII.")
    return {
        "headers": {} if key is None else {"Authorization": f"Bearer {key}"},
        "timeout": httpx2.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS),
        "limits": httpx2.Limits(max_connections=None),
        "trust_env": urlsplit(url).hostname not in LOCAL,
    }


def as_json(body: Any) -> bytes:
    return json.dumps({} if body is None else body).encode()


@contextmanager
def failures(url: str) -> Iterator[None]:
    """What the HTTP client raises in this block becomes a ServerError."""
    import httpx2

    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as problem:
        raise ServerError(
            f"There is no server at {url} ({one_line(problem) or 'no answer'}); start one with fp8serve serve, or give "
            "the URL of another."
        ) from None
    except httpx2.TimeoutException:
        raise ServerError(f"The server at {url} has been silent for {SILENT_SECONDS:.0f} seconds.") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as problem:
        raise ServerError(f"The server at {url} broke off: {one_line(problem) or type(problem).__name__}.") from None


def answered(response: "Response") -> Any:
    """The JSON of a success. ServerError for anything else."""
    if not response.is_success:
        raise refusal(response)
    try:
        return response.json()
    except ValueError:
        raise ServerError(f"{response.url} answered what is not JSON; is it the URL of such a server?") from None


def refusal(response: "Response") -> ServerError:
    """The error for a status other than success. The body has been read."""
    status, (text, code) = response.status_code, _complaint(response)
    if status in (401, 403):
        sentence = f"The server refuses the key, or the lack of one ({text or status}); {KEY_HINT}."
    elif response.is_redirect:
        sentence = f"The server is not here: it answered {status} and names {shown(response.headers.get('location'))}."
    elif text:
        sentence = f"The server answered {status}: {text}."
    else:
        hint = f"; is there such a server at {response.url}?" if status == 404 else "."
        sentence = f"The server answered {status} {response.reason_phrase}{hint}"
    return ServerError(sentence, status, code)


def _complaint(response: "Response") -> tuple[str, str | None]:
    """The message of an error and its code, as OpenAI's, vLLM's and our own routes spell them."""
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else {}
        fields = error if isinstance(error, dict) else {**body, "message": error}
    except ValueError:
        return "", None
    message, code = fields.get("message") or fields.get("detail"), fields.get("code")
    hint = f". {fields['hint'].rstrip('.')}" if isinstance(fields.get("hint"), str) else ""
    return one_line(f"{str(message).rstrip('.')}{hint}") if message else "", code if isinstance(code, str) else None


def event_object(event: "ServerSentEvent") -> dict[str, Any]:
    """The JSON object of an event. ServerError when it is not one, or reports an error."""
    try:
        value = event.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerError(f"The server sent an event that is not a JSON object: {shown(event.data)}.")
    if error := value.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise ServerError(f"The server ended its answer with an error: {one_line(message)}.")
    return value


def member(answer: Any, name: str, what: str) -> str:
    """A text field of an answer. ServerError when it is missing."""
    if not isinstance(answer, dict) or not isinstance(answer.get(name), str):
        raise ServerError(f"The server's answer has no {what}; is it an fp8serve server?")
    return str(answer[name])


def model_names(listed: Any) -> list[str]:
    """The models in an answer of /v1/models. ServerError when it is invalid."""
    try:
        return [str(model["id"]) for model in listed["data"]]
    except (TypeError, KeyError):
        raise ServerError("/v1/models did not return a list of models; is it a server of OpenAI's API?") from None
