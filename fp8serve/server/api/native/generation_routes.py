"""The native generation routes: text-generation-inference's shapes, so its clients work, and a little more."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.server.api.answer_pipeline import respond
from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.api.native.generation_renderer import ListRenderer, NativeRenderer
from fp8serve.server.api.native.generation_requests import parse
from fp8serve.server.api.wire import STREAM_RESPONSE
from fp8serve.server.faults import Code, Fault
from fp8serve.server.schemas.generation_bodies import GenerateBody

router = APIRouter(tags=["generation"], route_class=BoundedRoute)


@router.post("/generate", summary="Generate text", response_model=None, responses=STREAM_RESPONSE)
async def generate(body: GenerateBody, request: Request, state: StateDep) -> Response:
    """One answer, or server-sent events with `stream: true`."""
    return await respond(body, parse, NativeRenderer, request, state, stream=body.stream)


@router.post(
    "/generate_stream", summary="Generate text as server-sent events", response_model=None, responses=STREAM_RESPONSE
)
async def generate_stream(body: GenerateBody, request: Request, state: StateDep) -> Response:
    if body.parameters.decoder_input_details:
        param = "parameters.decoder_input_details"
        raise Fault(Code.INVALID_PARAMETER, "decoder_input_details cannot be streamed.", param=param)
    return await respond(body, parse, NativeRenderer, request, state, stream=True)


@router.post("/generate/stream", include_in_schema=False)
async def generate_slash_stream(body: GenerateBody, request: Request, state: StateDep) -> Response:
    return await generate_stream(body, request, state)


@router.post(
    "/",
    summary="The same for clients of Hugging Face's inference endpoints",
    response_model=None,
    responses=STREAM_RESPONSE,
)
async def root(body: GenerateBody, request: Request, state: StateDep) -> Response:
    """As /generate; the answer without `stream` is a list of one."""
    return await respond(body, parse, ListRenderer, request, state, stream=body.stream)
