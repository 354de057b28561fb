"""Fine-tune jobs of a server of ours: what the routes under /finetune and /models answer."""

from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import quote

from fp8serve.client.api import Api, event_object, member
from fp8serve.errors import ServerError

Job = dict[str, Any]
PAGE = 100


def place(job_id: str, action: str = "") -> str:
    """The path of a job; an id is never more than one part of it."""
    return "/finetune/" + quote(job_id, safe="") + action


def jobs(api: Api, most: int) -> list[Job]:
    """The newest ones, newest first."""
    found: list[Job] = []
    more = True
    while more and len(found) < most:
        after = {"after": found[-1]["id"]} if found else {}
        page = _page(api.get("/finetune", limit=min(PAGE, most - len(found)), **after))
        found += page["jobs"]
        more = bool(page.get("has_more") and page["jobs"])
    return found


def _page(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict) or not isinstance(answer.get("jobs"), list):
        raise ServerError("The server named no jobs; is it one of fp8serve?")
    return answer


def one_job(answer: Any) -> Job:
    """An answer that is a job."""
    member(answer, "status", "status of a job")
    member(answer, "id", "job")
    return dict(answer)


def follow(api: Api, job_id: str, tell: Callable[[dict[str, Any]], None]) -> str:
    """Tells of every event of a job, those before included, until it has ended; returns its status then."""
    with closing(api.events(place(job_id, "/events"))) as events:  # type: ignore[type-var]  # a generator
        for event in events:
            found = event_object(event)
            if event.event == "end":
                return member(found, "status", "status")
            tell(found)
    raise ServerError("The server went away before the job had ended; the job goes on when it is started again.")
