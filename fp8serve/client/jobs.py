"""Fine-tune jobs of an fp8serve server, through the routes under /finetune and /models."""

from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import quote

from fp8serve.client.api import Api, parse_event, text_field
from fp8serve.errors import ServerError

Job = dict[str, Any]
PAGE_SIZE = 100  # jobs in a response


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
