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
from stages.view.viewer import Viewer
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
    """The pages over one store. Answers are computed on threads, as they read files."""

    def gallery(request: Request) -> Response:
        query = request.query_params
        label = query.get("class", "")
        page = viewer.gallery.page(
            query.get("order", "id"),
            None if label == "" else number("class", label),
            number("page", query.get("page", "0")),
        )
        return JSONResponse(page)

    def pixels(request: Request) -> Response:
        keep = {"Cache-Control": "private, max-age=3600"}  # the address names the store
        return Response(viewer.pixels(*image_and_view(request)), 200, keep, "image/png")

    def binary(content: Callable[..., bytes], of_whom: bool = False) -> Any:
        def answer(request: Request) -> Response:
            who = [request.path_params["name"]] if of_whom else []
            return Response(content(*who, *image_and_view(request)), media_type=BINARY)

        return answer

    answers: dict[str, Callable[[Request], Response]] = {
        "/api/about": lambda _: JSONResponse({**viewer.about(), "colours": colours()}),
        "/api/status": lambda _: JSONResponse(viewer.status()),
        "/api/gallery": gallery,
        "/api/image/{image}": binary(viewer.image),
        "/api/pixels/{store}/{image}.png": pixels,
        "/api/student/{name}/{image}": binary(viewer.student, of_whom=True),
        "/api/epochs/{name}/{image}": binary(viewer.epochs, of_whom=True),
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


def number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(f"{name} {text[:20]!r}: should be a whole number")
    return int(text)
