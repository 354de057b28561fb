"""An HTTP client that sends and receives JSON, uploads files and reads event streams; and the jobs of a server.

Every failure raises ServerError with a message for the user: the server cannot be reached, the URL or the key is wrong,
the server returned an error (the message quotes it), or the connection was lost. Requests use the proxies in the
environment, except those to servers on this machine.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

from fp8serve.errors import DataError, RequestError, ServerError, one_line, shown
from fp8serve.options import http_address

if TYPE_CHECKING:
    from httpx2 import Response, ServerSentEvent

Job = dict[str, Any]
CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0  # a server on a slow machine may need minutes for a long prompt
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
PAGE_SIZE = 100  # jobs in a response
KEY_HINT = "provide the right key with --api-key-file or in FP8SERVE_API_KEY"


class Api:
    """A client of the server at `url`, which may end with /v1. Raises RequestError if the URL or the key is invalid."""

    def __init__(self, url: str, key: str | None = None) -> None:
        import httpx2

        self.url = base_url(url)
        self._client = httpx2.Client(**client_options(self.url, key))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def get(self, path: str, **query: str | int) -> Any:
        with translated_errors(self.url):
            return parse_response(self._client.get(self.url + path, params=query))

    def post(self, path: str, body: Any = None) -> Any:
        with translated_errors(self.url):
            return parse_response(self._client.post(self.url + path, content=encode_json(body), headers=JSON))

    def delete(self, path: str) -> Any:
        with translated_errors(self.url):
            return parse_response(self._client.delete(self.url + path))

    def upload(self, file: Path) -> str:
        """Uploads a file of training data and returns its id. Raises DataError if the file cannot be read."""
        try:
            with file.open("rb") as data, translated_errors(self.url):
                form: dict[str, Any] = {"files": {"file": (file.name, data)}, "data": {"purpose": "fine-tune"}}
                response = parse_response(self._client.post(f"{self.url}/v1/files", **form))
        except OSError as problem:
            raise DataError(f"{file} cannot be read: {problem.strerror or problem}.") from None
        return text_field(response, "id", "file")

    def events(self, path: str, body: Any = None) -> Iterator["ServerSentEvent"]:
        """Yields the events of the response to a POST request with `body`, or to a GET request without one."""
        options: dict[str, Any] = {}
        if body is not None:
            options = {"method": "POST", "content": encode_json(body), "headers": JSON}
        with translated_errors(self.url), self._client.sse(self.url + path, **options) as source:
            if source.response.status_code != 200:
                source.response.read()
                raise response_error(source.response)
            yield from source

    def objects(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """Yields the JSON objects of a stream of OpenAI's API, which ends with [DONE]."""
        with closing(self.events(path, body)) as events:  # type: ignore[type-var]  # a generator
            for event in events:
                if event.data == "[DONE]":
                    return
                yield parse_event(event)

    def first_model(self) -> str:
        """Returns the name of the server's first model."""
        names = model_names(self.get("/v1/models"))
        if not names:
            raise ServerError(f"The server at {self.url} serves no model now; wait until it has loaded one.")
        return names[0]


# -- functions that the asynchronous client of `bench serve` uses, too -------------------------------------------------

JSON = {"Content-Type": "application/json"}


def base_url(url: str) -> str:
    """Removes a trailing /v1 and slashes from a URL. Raises RequestError if the URL is invalid."""
    parts = http_address(url.strip())
    if parts is None or parts.query or parts.fragment:
        raise RequestError(f"{shown(url)} is not the URL of a server; use a URL such as http://127.0.0.1:8000.")
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def client_options(url: str, key: str | None) -> dict[str, Any]:
    """Returns the keyword arguments of httpx2's clients. Raises RequestError if the key is not printable ASCII."""
    import httpx2

    if key is not None and not (key.isascii() and key.isprintable() and key):
        raise RequestError("The API key has characters that an HTTP header cannot have; it must be printable ASCII.")
    return {
        "headers": {} if key is None else {"Authorization": f"Bearer {key}"},
        "timeout": httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
        "limits": httpx2.Limits(max_connections=None),
        "trust_env": urlsplit(url).hostname not in LOCAL_HOSTS,
    }


def encode_json(body: Any) -> bytes:
    return json.dumps({} if body is None else body).encode()


@contextmanager
def translated_errors(url: str) -> Iterator[None]:
    """Converts the exceptions of the HTTP client within this block to ServerError."""
    import httpx2

    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as problem:
        raise ServerError(
            f"There is no server at {url} ({one_line(problem) or 'no answer'}); start one with fp8serve serve, or give "
            "the URL of another."
        ) from None
    except httpx2.TimeoutException:
        raise ServerError(f"The server at {url} sent nothing for {READ_SECONDS:.0f} seconds.") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as problem:
        reason = one_line(problem) or type(problem).__name__
        raise ServerError(f"The server at {url} closed the connection: {reason}.") from None


def parse_response(response: "Response") -> Any:
    """Returns the JSON of a successful response. Raises ServerError for any other response."""
    if not response.is_success:
        raise response_error(response)
    try:
        return response.json()
    except ValueError:
        raise ServerError(f"The response of {response.url} is not JSON; check the URL of the server.") from None


def response_error(response: "Response") -> ServerError:
    """Returns the error that describes an unsuccessful response, whose body must have been read."""
    status, (reason, code) = response.status_code, _error_message(response)
    if status in (401, 403):
        message = f"The server refuses the API key or requires one ({reason or status}); {KEY_HINT}."
    elif response.is_redirect:
        location = shown(response.headers.get("location"))
        message = f"The server responded with a redirect ({status}) to {location}; use the URL of the server itself."
    elif reason:
        message = f"The server answered {status}: {reason}."
    else:
        hint = f"; check the URL of the server ({response.url})." if status == 404 else "."
        message = f"The server answered {status} {response.reason_phrase}{hint}"
    return ServerError(message, status, code)


def _error_message(response: "Response") -> tuple[str, str | None]:
    """Returns the message and the code in the error response of an OpenAI, vLLM or fp8serve server."""
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else {}
        fields = error if isinstance(error, dict) else {**body, "message": error}
    except ValueError:
        return "", None
    message, code = fields.get("message") or fields.get("detail"), fields.get("code")
    hint = f". {fields['hint'].rstrip('.')}" if isinstance(fields.get("hint"), str) else ""
    return one_line(f"{str(message).rstrip('.')}{hint}") if message else "", code if isinstance(code, str) else None


def parse_event(event: "ServerSentEvent") -> dict[str, Any]:
    """Returns the JSON object of an event. Raises ServerError if it is no JSON object or reports an error."""
    try:
        value = event.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerError(f"The server sent an event that is not a JSON object: {shown(event.data)}.")
    if error := value.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise ServerError(f"The server ended the stream with an error: {one_line(message)}.")
    return value


def text_field(response: Any, name: str, description: str) -> str:
    """Returns the text field `name` of a response. Raises ServerError if the field is missing."""
    if not isinstance(response, dict) or not isinstance(response.get(name), str):
        raise ServerError(f"The server's response has no {description}; is it an fp8serve server?")
    return str(response[name])


def model_names(response: Any) -> list[str]:
    """Returns the names of the models in a response of /v1/models. Raises ServerError if the response is invalid."""
    try:
        return [str(model["id"]) for model in response["data"]]
    except (TypeError, KeyError):
        raise ServerError("/v1/models did not return a list of models; is it a server with OpenAI's API?") from None


# -- fine-tune jobs, under /finetune -----------------------------------------------------------------------------------


def job_path(job_id: str, action: str = "") -> str:
    """Returns the path of a job, or of an action such as "/pause". The id is escaped."""
    return "/finetune/" + quote(job_id, safe="") + action


def list_jobs(api: Api, max_jobs: int) -> list[Job]:
    """Returns up to `max_jobs` jobs, newest first."""
    jobs: list[Job] = []
    has_more = True
    while has_more and len(jobs) < max_jobs:
        after = {"after": jobs[-1]["id"]} if jobs else {}
        response = api.get("/finetune", limit=min(PAGE_SIZE, max_jobs - len(jobs)), **after)
        if not isinstance(response, dict) or not isinstance(response.get("jobs"), list):
            raise ServerError("The server's response has no jobs; is it an fp8serve server?")
        jobs += response["jobs"]
        has_more = bool(response.get("has_more") and response["jobs"])
    return jobs


def check_job(response: Any) -> Job:
    """Returns the job of a response. Raises ServerError if the response is no job."""
    text_field(response, "status", "status of a job")
    text_field(response, "id", "job")
    return dict(response)


def job_metrics(api: Api, job_id: str) -> list[dict[str, Any]]:
    """Returns the metrics of every reported step, oldest first."""
    response = api.get(job_path(job_id, "/metrics"))
    if not isinstance(response, dict) or not isinstance(response.get("metrics"), list):
        raise ServerError("The server's response has no metrics; is it an fp8serve server?")
    return [dict(row) for row in response["metrics"]]


def follow(api: Api, job_id: str, on_event: Callable[[dict[str, Any]], None]) -> str:
    """Calls `on_event` with every event of a job, including earlier events, until the job ends. Returns its status."""
    with closing(api.events(job_path(job_id, "/events"))) as events:  # type: ignore[type-var]  # a generator
        for event in events:
            data = parse_event(event)
            if event.event == "end":
                return text_field(data, "status", "status")
            on_event(data)
    raise ServerError(
        "The server closed the connection before the job ended. If the server was stopped, the job continues when the "
        "server starts again."
    )
