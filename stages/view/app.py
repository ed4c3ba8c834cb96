"""The server behind the page: numbers of the store, pixels of the data set, and the page's own
files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from anyio.to_thread import current_default_thread_limiter
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from gaupipe.system.errors import UserError
from stages.view.page import STATIC
from stages.view.viewer import PHOTO, Viewer
from store import StoreError

HOSTS = ["127.0.0.1", "localhost"]
"""Names under which a browser may ask. A page of another name that leads here is refused."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
THREADS = 3
"""On which answers are computed: each holds a whole photo, and the memory that it once needed."""
MOST_BYTES = 100_000_000
"""Of an image that is dropped on the page."""
Number = Annotated[int, Field(ge=0, lt=10**9)]


class Question(BaseModel):
    """What may stand in an address."""

    image: Number = 0
    view: Number = 0
    split: str = "train"
    student: str = ""
    """"" is the store's teacher or, where there is no store, the first model."""
    label: Annotated[Number | None, BeforeValidator(lambda text: text or None)] = Field(
        None, alias="class"
    )
    order: str = "id"
    page: Number = 0
    name: str = ""
    """Of a file."""
    side: Number = PHOTO
    patches: Annotated[list[Number], BeforeValidator(lambda text: text.split(","))] = [0]


Content = Mapping[str, Any] | bytes | tuple[bytes, str]
Answer = Callable[[Question], Content]


@contextlib.asynccontextmanager
async def few_threads(app: Starlette) -> AsyncIterator[None]:
    """Leaves the server :data:`THREADS`, where it would take 40."""
    current_default_thread_limiter().total_tokens = THREADS
    yield


async def with_headers(request: Request, answer: RequestResponseEndpoint) -> Response:
    """Adds :data:`HEADERS` to every answer."""
    response = await answer(request)
    response.headers.update(HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    return response


def asked(request: Request) -> Question:
    """What an address asks for."""
    try:
        return Question.model_validate(request.path_params | dict(request.query_params))
    except ValidationError as error:
        first = error.errors()[0]
        wrong = f"{first['loc'][0]} {str(first['input'])[:20]!r}"
        raise UserError(f"{wrong}: should be a whole number") from None


def make_app(viewer: Viewer) -> Starlette:
    """The pages of one viewer, below its token: other users of this machine, who do not know it,
    get one answer whatever they ask for. Answers are computed on threads, as they read files."""

    answers: dict[str, Answer] = {
        "/api/about": lambda a: asdict(viewer.about()),
        "/api/status": lambda a: asdict(viewer.status(a.split, a.student)),
        "/api/gallery": lambda a: asdict(viewer.page(a.split, a.student, a.order, a.label, a.page)),
        "/api/image/{image}": lambda a: viewer.image(a.image, a.view, a.split, a.student),
        "/api/pixels/{image}": lambda a: viewer.pixels(a.image, a.view, a.split, max(a.side, 1)),
        "/api/relevance/{image}": lambda a: viewer.relevance(
            a.student, a.image, a.label, a.view, a.split
        ),
        "/api/find": lambda a: {"image": viewer.find(a.name, a.split)},
        "/api/test/{image}": lambda a: asdict(
            viewer.test(a.student, a.image, a.label, a.patches, a.view, a.split)
        ),
    }

    async def add(request: Request) -> Response:
        """Adds the image that is the body, or whose name or path is asked for."""
        content = bytearray()
        async for part in request.stream():  # which need not say how long it is
            content += part
            if len(content) > MOST_BYTES:
                raise UserError(f"images have at most {MOST_BYTES} bytes")
        name = request.query_params.get("name", "")
        if content:
            image = await run_in_threadpool(viewer.drop, name, bytes(content))
        else:
            image = await run_in_threadpool(viewer.find_or_add, name)
        return as_json({"image": image})

    def first(answer: Answer) -> Answer:
        """An answer that somebody waits for, before whom nothing is read ahead."""

        def computed(question: Question) -> Content:
            with viewer.answers.awaited():
                return answer(question)

        return computed

    for path in ("image", "pixels", "relevance", "test"):
        answers[f"/api/{path}/{{image}}"] = first(answers[f"/api/{path}/{{image}}"])
    routes = [Route(path, partial(respond, answer)) for path, answer in answers.items()]
    routes.append(Route("/api/images", add, methods=["POST"]))
    page = Mount("/", StaticFiles(directory=Path(STATIC), html=True))
    return Starlette(
        lifespan=few_threads,
        routes=[Mount(f"/{viewer.token}", routes=[*routes, page])],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=with_headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        ],
        exception_handlers={
            UserError: refused(404),
            StoreError: refused(500),
            OSError: refused(500),
            ClientDisconnect: refused(400),  # a page that was closed while it sent an image
            404: not_found,
        },
    )


def respond(answer: Answer, request: Request) -> Response:
    content = answer(asked(request))
    if isinstance(content, bytes):
        return Response(content, media_type="application/octet-stream")
    if isinstance(content, tuple):
        keep = {"Cache-Control": "private, max-age=3600"}  # the address names the server
        return Response(content[0], 200, keep, content[1])
    return as_json(content)


def as_json(content: Any, code: int = 200) -> Response:
    """JSON in ASCII: the name of a file need not be UTF-8."""
    return Response(json.dumps(content), code, media_type="application/json")


async def not_found(request: Request, error: Exception) -> Response:
    return PlainTextResponse("Not found. Open the link that 'gaupipe view' printed.\n", 404)


def refused(code: int) -> Any:
    """Answers an error with its one line."""

    def answer(request: Request, error: Exception) -> Response:
        return as_json({"error": " ".join(str(error).split())}, code)

    return answer
