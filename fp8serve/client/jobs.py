"""Fine-tune jobs of an fp8serve server, through the routes under /finetune and /models."""

from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import quote

from fp8serve.client.api import Api, event_object, member
from fp8serve.errors import ServerError

Job = dict[str, Any]
PAGE = 100


def place(job_id: str, action: str = "") -> str:
    """The path of a job; an id is always a single component of it."""
    return "/finetune/" + quote(job_id, safe="") + action


def jobs(api: Api, most: int) -> list[Job]:
    """The newest ones, newest first."""
    jobs: list[Job] = []
    more = True
    while more and len(jobs) < most:
        after = {"after": jobs[-1]["id"]} if jobs else {}
        page = _page(api.get("/finetune", limit=min(PAGE, most - len(jobs)), **after))
        jobs += page["jobs"]
        more = bool(page.get("has_more") and page["jobs"])
    return jobs


def _page(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict) or not isinstance(answer.get("jobs"), list):
        raise ServerError("The server's answer has no jobs; is it an fp8serve server?")
    return answer


def one_job(answer: Any) -> Job:
    """Checks that an answer is a job."""
    member(answer, "status", "status of a job")
    member(answer, "id", "job")
    return dict(answer)


def series(api: Api, job_id: str) -> list[dict[str, Any]]:
    """The metrics of every reported step, oldest first."""
    answer = api.get(place(job_id, "/metrics"))
    if not isinstance(answer, dict) or not isinstance(answer.get("metrics"), list):
        raise ServerError("The server's answer has no metrics; is it an fp8serve server?")
    return [dict(row) for row in answer["metrics"]]


def follow(api: Api, job_id: str, on_event: Callable[[dict[str, Any]], None]) -> str:
    """Reports every event of a job, including earlier ones, until it ends; returns its final status."""
    with closing(api.events(place(job_id, "/events"))) as events:  # type: ignore[type-var]  # a generator
        for event in events:
            data = event_object(event)
            if event.event == "end":
                return member(data, "status", "status")
            on_event(data)
    raise ServerError("The server went away before the job had ended; the job goes on when it is started again.")
