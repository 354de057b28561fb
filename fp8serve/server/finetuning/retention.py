"""Deletes jobs that have ended, with everything that they wrote: one by its id, or the oldest beyond a number.

A job stays if its result is served, will be served when the server starts again, or is needed by another job. The job
leaves the table before its files are removed, so files that a crash leaves behind are removed at the next start.
"""

import logging
from dataclasses import dataclass

from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.checkpoints import job_of
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.serving.registry import Registry

log = logging.getLogger("fp8serve.server")


@dataclass(frozen=True)
class Retention:
    """Every call blocks. keep: the number of ended jobs that stay; None: all of them."""

    store: JobStore
    runner: JobRunner
    models: Registry
    keep: int | None

    def delete(self, job_id: str) -> None:
        """Fault 404: there is no such job. Fault 409: it has not ended, or is in use."""
        if any(job_of(key) == job_id for key in self.models.sources()):
            hint = "Activate or load something else in its place first."
            raise Fault(Code.JOB_STATE, "The job's result, or a checkpoint of it, is being served.", hint=hint)
        self.store.delete_job(job_id)
        self.runner.discard(job_id)

    def sweep(self) -> None:
        """Deletes the oldest jobs beyond `keep`, except those that must stay."""
        for job in () if self.keep is None else self.store.ended()[self.keep :]:
            try:
                self.delete(job.id)
            except Fault as fault:
                log.info("job %s is older than those that are kept, and stays: %s", job.id, fault.told)
            else:
                log.info("job %s was deleted: it was older than the %d that are kept", job.id, self.keep)
