"""`/v1/files`: training data, uploaded once and used by any number of jobs.

Bytes lie in `files/<id>.jsonl` (`.csv`, `.parquet` and so on) under the data directory; of the name that a client gave
only its end counts, which says how the file is read (docs/data.md). What is in the file is checked when a job uses it,
not here, as OpenAI's service does.
"""

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from fp8serve.model.storage.files import fsync, make_private
from fp8serve.model.text.data_files import ending_of
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.api.openai.pages import page
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.job_directory import file_path
from fp8serve.server.finetuning.job_records import StoredFile, new_file_id
from fp8serve.server.http.uploads import Upload, receive_upload
from fp8serve.server.server_state import ServerState

router = APIRouter(prefix="/v1/files", tags=["OpenAI"])
CHUNK = 1 << 16
PURPOSE = "fine-tune"
FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": {
    "type": "object", "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": PURPOSE}},
}}}}}  # fmt: skip


@router.post("", summary="Upload training data", openapi_extra=FORM)
async def upload(request: Request, state: StateDep) -> Response:
    """JSON lines, or by the end of its name text, JSON, CSV, TSV or Parquet; all but Parquet also with .gz."""
    folder = state.data_dir / "files"
    make_private(folder)
    file_id = new_file_id()
    arrived = await receive_upload(request, folder / f".{file_id}.part", state.settings.limits)
    return JSONResponse(view(await asyncio.to_thread(_keep, state, arrived, file_id)))


def _keep(state: ServerState, arrived: Upload, file_id: str) -> StoredFile:
    """Gives the file its name and its row; a file that is not accepted leaves nothing."""
    try:
        _check_form(arrived)
        final = arrived.path.with_name(file_id + ending_of(arrived.filename or ""))
        arrived.path.rename(final)
        try:
            fsync(final.parent)
            return state.jobs.add_file(file_id, arrived.filename or "", arrived.size, arrived.sha256, PURPOSE)
        except BaseException:
            final.unlink(missing_ok=True)
            raise
    finally:
        arrived.path.unlink(missing_ok=True)


def _check_form(arrived: Upload) -> None:
    if unknown := sorted(set(arrived.fields) - {"purpose"}):
        raise Fault(
            Code.UNSUPPORTED_PARAMETER, f"This server does not implement {unknown[0]}; leave it out.", param=unknown[0]
        )
    if arrived.fields.get("purpose") != PURPOSE:
        raise Fault(Code.INVALID_PARAMETER, f"purpose must be {PURPOSE}.", param="purpose")
    if arrived.size == 0:
        raise Fault(Code.INVALID_PARAMETER, "The file is empty.", param="file")


@router.get("", summary="Uploaded files")
async def list_files(
    state: StateDep,
    limit: Annotated[int, Query(ge=1, le=10000)] = 10000,
    after: str | None = None,
    purpose: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    found = await asyncio.to_thread(state.jobs.files, limit + 1, after, purpose, order == "asc")
    return page([view(item) for item in found[:limit]], len(found) > limit)


@router.get("/{file_id}", summary="Information about one file")
async def get_file(file_id: str, state: StateDep) -> dict[str, Any]:
    return view(await asyncio.to_thread(state.jobs.file, file_id))


@router.get("/{file_id}/content", summary="A file's bytes", response_class=StreamingResponse)
async def content(file_id: str, state: StateDep) -> Response:
    stored = await asyncio.to_thread(state.jobs.file, file_id)
    path = file_path(state.data_dir, stored.id)

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    return StreamingResponse(
        chunks(), media_type="application/octet-stream", headers={"Content-Length": str(stored.bytes)}
    )


@router.delete("/{file_id}", summary="Delete a file; jobs that used it keep their copy")
async def delete(file_id: str, state: StateDep) -> dict[str, Any]:
    await asyncio.to_thread(state.jobs.delete_file, file_id)
    for path in (state.data_dir / "files").glob(f"{file_id}.*"):
        path.unlink(missing_ok=True)
    return {"id": file_id, "object": "file", "deleted": True}


def view(item: StoredFile) -> dict[str, Any]:
    """OpenAI's file object."""
    facts = {"bytes": item.bytes, "created_at": item.created_at, "filename": item.filename, "purpose": item.purpose}
    return {"id": item.id, "object": "file", "status": "processed", "expires_at": None, "status_details": None} | facts
