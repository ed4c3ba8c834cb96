"""The server behind the page: numbers of the store, pixels of the data set, and the page's own
files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
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


class Answers:
    """Adds :data:`HEADERS` to every answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [
                    (name.lower().encode(), value.encode()) for name, value in HEADERS.items()
                ]
                if not any(name == b"cache-control" for name, _ in message["headers"]):
                    message["headers"].append((b"cache-control", b"no-store"))
            await send(message)

        await self.app(scope, receive, with_headers)


def make_app(viewer: Viewer) -> Starlette:
    """The pages over one store. Answers are computed on threads, as they read files."""

    def about(request: Request) -> Response:
        return JSONResponse({**viewer.about(), "colours": colours()})

    def status(request: Request) -> Response:
        return JSONResponse(viewer.status())

    def gallery(request: Request) -> Response:
        asked = request.query_params
        label = asked.get("class", "")
        page = viewer.gallery.page(
            asked.get("order", "id"),
            None if label == "" else number("class", label),
            number("page", asked.get("page", "0")),
        )
        return JSONResponse(page)

    def image(request: Request) -> Response:
        return Response(viewer.image(*place(request)), 200, None, BINARY)

    def pixels(request: Request) -> Response:
        keep = {"Cache-Control": "private, max-age=3600"}  # the address names the store
        return Response(viewer.pixels(*place(request)), 200, keep, "image/png")

    def student(request: Request) -> Response:
        message = viewer.student(request.path_params["name"], *place(request))
        return Response(message, 200, None, BINARY)

    def epochs(request: Request) -> Response:
        message = viewer.epochs(request.path_params["name"], place(request)[0])
        return Response(message, 200, None, BINARY)

    answers: dict[str, Callable[[Request], Response]] = {
        "/api/about": about,
        "/api/status": status,
        "/api/gallery": gallery,
        "/api/image/{image}": image,
        "/api/pixels/{store}/{image}.png": pixels,
        "/api/student/{name}/{image}": student,
        "/api/epochs/{name}/{image}": epochs,
    }
    routes = [Route(path, answer) for path, answer in answers.items()]
    return Starlette(
        routes=[*routes, Mount("/", StaticFiles(directory=Path(STATIC), html=True))],
        middleware=[
            Middleware(Answers),
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


def place(request: Request) -> tuple[int, int]:
    """The image and the view that an address names."""
    view = request.query_params.get("view", "0")
    return number("image", request.path_params["image"]), number("view", view)


def number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(f"{name} {text[:20]!r}: should be a whole number")
    return int(text)
