"""The files of jobs and uploads: below the data directory, and, with --artifacts, in a bucket that other servers read.

    jobs/JOB/job.json, data.*, validation.*     before the job enters the database
    jobs/JOB/out/checkpoints/step-N             when the training process has reported the checkpoint
    jobs/JOB/out/model                          before the job succeeds
    jobs/JOB/served/step-N                      a checkpoint that was exported as a model
    files/FILE.*                                an upload, before it enters the database

A bucket has no directories that appear at once, so a directory is complete when the object NAME.complete exists. A
server copies what it needs to its own disk, because training and serving map files into memory. The paths of data and
of earlier jobs in job.json are stored relative to the directory of jobs. fsspec opens the bucket, with the credentials
that its library finds (for S3 those of the AWS tools).
"""

import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8serve.errors import MachineError, one_line
from fp8serve.model.storage.files import atomic_file, fsync_tree, make_private, read_text
from fp8serve.server.faults import Code, Fault

log = logging.getLogger("fp8serve.server")
COMPLETE = ".complete"
JOBS = '"@jobs/'  # the beginning of a path below the directory of jobs, in a job.json of the bucket
MAX_JOB_BYTES = 64 * 1024 * 1024


class Bucket:
    """A bucket, or a directory of it, that fsspec opens. Raises MachineError if this server may not read, write, list
    and delete there. Later errors are raised as Fault 503."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped,unused-ignore]

            options: dict[str, Any] = {"auto_mkdir": True} if "://" not in url or url.startswith("file:") else {}
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
            self._root = root.rstrip("/")
            probe = f"{self._root}/.probe-{secrets.token_hex(8)}"
            self._fs.pipe_file(probe, b"probe")
            self._fs.cat_file(probe)
            self._fs.find(self._root, maxdepth=1)
            self._fs.rm_file(probe)
        except ImportError as error:
            raise MachineError(f"--artifacts needs a package that is not installed: {one_line(error)}.") from None
        except Exception as error:  # each library has errors of its own
            raise MachineError(
                f"The bucket of --artifacts cannot be read and written ({type(error).__name__}: {one_line(error)}); "
                "check its name, credentials and permissions."
            ) from None

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.error("the bucket of --artifacts cannot be used: %s: %s", type(error).__name__, one_line(error))
            message = "The bucket of the server's files cannot be used."
            raise Fault(Code.STORAGE_UNAVAILABLE, message, retry_after=5) from None

    def names(self, folder: str, suffix: str = "") -> set[str]:
        """Returns the names of the objects directly in `folder` that end with `suffix`, without it."""
        with self._faults():
            paths = self._fs.find(f"{self._root}/{folder}", maxdepth=1)
            return {path.rpartition("/")[2].removesuffix(suffix) for path in paths if path.endswith(suffix)}

    def read(self, name: str) -> bytes:
        with self._faults():
            content: bytes = self._fs.cat_file(f"{self._root}/{name}")
            return content

    def write(self, name: str, content: bytes) -> None:
        with self._faults():
            self._fs.pipe_file(f"{self._root}/{name}", content)

    def put(self, path: Path, name: str) -> None:
        """Copies a file or directory into the bucket."""
        with self._faults():
            if path.is_file():
                self._fs.put_file(str(path), f"{self._root}/{name}")
                return
            for file in sorted(path.rglob("*")):
                if file.is_file():
                    self._fs.put_file(str(file), f"{self._root}/{name}/{file.relative_to(path)}")
            self._fs.pipe_file(f"{self._root}/{name}{COMPLETE}", b"")

    def get(self, name: str, path: Path) -> None:
        """Copies a file or a complete directory to `path`, which appears whole or not at all."""
        temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        source = f"{self._root}/{name}"
        try:
            with self._faults():
                if self._fs.isfile(source):
                    self._fs.get_file(source, str(temporary))
                else:
                    for file in self._fs.find(source):
                        target = temporary / file[len(source) + 1 :]
                        target.parent.mkdir(parents=True, exist_ok=True)
                        self._fs.get_file(file, str(target))
                    fsync_tree(temporary)
            with contextlib.suppress(OSError):  # another request may have copied the directory meanwhile
                os.rename(temporary, path)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)

    def exists(self, name: str) -> bool:
        """Whether there is such a file or complete directory."""
        with self._faults():
            return any(self._fs.isfile(f"{self._root}/{name}{suffix}") for suffix in ("", COMPLETE))

    def delete(self, name: str) -> None:
        """Deletes a file or directory. Its sign of completeness goes first."""
        with self._faults():
            for path in (f"{self._root}/{name}{COMPLETE}", f"{self._root}/{name}"):
                if self._fs.exists(path):
                    self._fs.rm(path, recursive=True)


class Artifacts:
    """The files of jobs and uploads in the directory `root`, with copies in `bucket` if there is one. Every call that
    is not about paths alone blocks."""

    def __init__(self, root: Path, bucket: Bucket | None = None) -> None:
        self.root, self.jobs, self.bucket = root, root / "jobs", bucket
        make_private(self.jobs)

    def job_dir(self, job_id: str) -> Path:
        """Returns the directory of a job. `job_id` must be in the database, because it becomes a path."""
        return self.jobs / job_id

    def checkpoints_dir(self, job_id: str) -> Path:
        return self.jobs / job_id / "out" / "checkpoints"

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def publish(self, path: Path) -> None:
        """Copies a file or directory to the bucket."""
        if self.bucket is not None:
            self.bucket.put(path, self._name(path))

    def fetch(self, path: Path) -> Path:
        """Returns `path`, which is copied from the bucket if only the bucket has it."""
        if self.bucket is not None and not path.exists() and self.bucket.exists(name := self._name(path)):
            self.bucket.get(name, path)
        return path

    def discard(self, path: Path) -> None:
        """Deletes a file or directory here and in the bucket. If the bucket cannot be used, its copy stays there."""
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if self.bucket is not None:
            with contextlib.suppress(Fault):  # it is logged
                self.bucket.delete(self._name(path))

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def has_job(self, job_id: str) -> bool:
        """Whether the job's configuration and rows can be read here."""
        path = self.job_dir(job_id) / "job.json"
        return path.exists() or (self.bucket is not None and self.bucket.exists(self._name(path)))

    def publish_job(self, job_id: str) -> None:
        """Copies the rows of a job to the bucket, and then its configuration."""
        if self.bucket is None:
            return
        directory = self.job_dir(job_id)
        for path in sorted(directory.iterdir()):
            if path.is_file() and path.name != "job.json":
                self.publish(path)
        text = read_text(directory / "job.json", MAX_JOB_BYTES).replace(self._jobs_prefix, JOBS)
        self.bucket.write(self._name(directory / "job.json"), text.encode())

    def fetch_job(self, job_id: str) -> Path:
        """Returns the directory of a job, with its rows, its configuration and the model that it trains."""
        directory = self.job_dir(job_id)
        if self.bucket is None or (directory / "job.json").exists():
            return directory
        make_private(directory)
        name = self._name(directory)
        for file in self.bucket.names(name):
            if file.startswith(("data.", "validation.")):
                self.fetch(directory / file)
        text = self.bucket.read(f"{name}/job.json").decode().replace(JOBS, self._jobs_prefix)
        model = Path(json.loads(text)["model"])
        if model.is_relative_to(self.jobs):
            self.fetch(model)
        with atomic_file(directory / "job.json") as temporary:
            temporary.write_text(text, encoding="utf-8")
        return directory

    @property
    def _jobs_prefix(self) -> str:
        return f'"{self.jobs}/'

    def checkpoints(self, job_id: str) -> set[str]:
        """Returns the names of the checkpoints that can be read here."""
        directory = self.checkpoints_dir(job_id)
        local = {path.name for path in directory.iterdir() if path.is_dir()} if directory.is_dir() else set()
        return local if self.bucket is None else local | self.bucket.names(self._name(directory), COMPLETE)

    def fetch_checkpoints(self, job_id: str) -> None:
        for name in self.checkpoints(job_id):
            self.fetch(self.checkpoints_dir(job_id) / name)

    def publish_checkpoints(self, job_id: str) -> None:
        """Copies new checkpoints to the bucket, and deletes those that the training process has deleted. If the bucket
        cannot be used, the next call tries again."""
        if self.bucket is None:
            return
        directory = self.checkpoints_dir(job_id)
        local = {path.name for path in directory.glob("step-*") if path.is_dir()}
        with contextlib.suppress(Fault):  # it is logged
            published = self.bucket.names(self._name(directory), COMPLETE)
            for name in sorted(local - published):
                self.publish(directory / name)
            for name in published - local:
                self.bucket.delete(self._name(directory / name))
