"""The server behind the page: numbers of the store, pixels of the data set, and the page's own
files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from gaupipe.system.errors import UserError
from stages.view.page import STATIC, colours
from stages.view.viewer import TEACHER, Viewer
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
BINARY = "application/octet-stream"


async def with_headers(request: Request, answer: RequestResponseEndpoint) -> Response:
    """Adds :data:`HEADERS` to every answer."""
    response = await answer(request)
    response.headers.update(HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    return response


def make_app(viewer: Viewer) -> Starlette:
    """The pages of one viewer. Answers are computed on threads, as they read files."""

    def gallery(request: Request) -> Response:
        query = request.query_params
        label = query.get("class", "")
        page = viewer.gallery(*split_and_student(request)).page(
            query.get("order", "id"),
            None if label == "" else number("class", label),
            number("page", query.get("page", "0")),
        )
        return JSONResponse(page)

    def pixels(request: Request) -> Response:
        keep = {"Cache-Control": "private, max-age=3600"}  # the address names the server
        split, _ = split_and_student(request)
        content = viewer.pixels(*image_and_view(request), split)
        return Response(content, 200, keep, "image/png")

    def image(request: Request) -> Response:
        return Response(viewer.image(*image_and_view(request)), media_type=BINARY)

    def student(request: Request) -> Response:
        split, name = split_and_student(request)
        content = viewer.student(name, *image_and_view(request), split)
        return Response(content, media_type=BINARY)

    def relevance(request: Request) -> Response:
        (split, name), (image, view) = split_and_student(request), image_and_view(request)
        label = request.query_params.get("class", "")
        target = None if label == "" else number("class", label)
        return Response(viewer.relevance(name, image, target, view, split), media_type=BINARY)

    def epochs(request: Request) -> Response:
        who, image = request.query_params.get("student", TEACHER), image_and_view(request)[0]
        return Response(viewer.epochs(who, image), media_type=BINARY)

    answers: dict[str, Callable[[Request], Response]] = {
        "/api/about": lambda _: JSONResponse({**viewer.about(), "colours": colours()}),
        "/api/status": lambda request: JSONResponse(viewer.status(*split_and_student(request))),
        "/api/gallery": gallery,
        "/api/image/{image}": image,
        "/api/pixels/{token}/{image}.png": pixels,
        "/api/student/{image}": student,
        "/api/relevance/{image}": relevance,
        "/api/epochs/{image}": epochs,
    }
    routes = [Route(path, answer) for path, answer in answers.items()]
    return Starlette(
        routes=[*routes, Mount("/", StaticFiles(directory=Path(STATIC), html=True))],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=with_headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        ],
        exception_handlers={
            UserError: refused(404),
            StoreError: refused(500),
            OSError: refused(500),
        },
    )


def refused(code: int) -> Any:
    """Answers an error with its one line."""

    def answer(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": " ".join(str(error).split())}, code)

    return answer


def image_and_view(request: Request) -> tuple[int, int]:
    """The image and the view that an address names."""
    view = request.query_params.get("view", "0")
    return number("image", request.path_params["image"]), number("view", view)


def split_and_student(request: Request) -> tuple[str, str]:
    """The split and the student that an address names; an empty name is the store's teacher, or the
    first model where there is no store."""
    return request.query_params.get("split", "train"), request.query_params.get("student", "")


def number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(f"{name} {text[:20]!r}: should be a whole number")
    return int(text)
