"""The routes: what each path answers. ``create_app`` puts them together around one engine."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ebbtide.errors import InputError
from ebbtide.server.config import ServerConfig
from ebbtide.server.errors import ServerFailure, error_object, error_response, json_response
from ebbtide.server.generation import ClientGone
from ebbtide.server.metrics import Metrics
from ebbtide.server.service import Service

if TYPE_CHECKING:
    from ebbtide.engine.async_engine import AsyncEngine

log = logging.getLogger("ebbtide.server")

RESET = "/v1/kv/reset"  # whose path is never suggested
_ROUTE = "ebbtide.route"  # key of the ASGI scope: the path template that answers


def _answering(
    path: str, route: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Turn what ``route`` raises into a response, and note which path answered."""

    async def answer(request: Request) -> Response:
        request.scope[_ROUTE] = path
        try:
            return await route(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)  # nobody is there to read it
        except (InputError, ServerFailure) as error:
            return error_response(error)
        except Exception as error:
            log.exception("%s failed", request.url.path)
            return error_response(error)

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the API's shape."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:100]
    messages = {
        404: (f"there is nothing at {path}{_near(request)}", "unknown_path"),
        405: (f"{path} does not take {method}", "method_not_allowed"),
    }
    message, code = messages.get(error.status_code, (str(error.detail), None))
    body = error_object(message, "invalid_request_error", code=code)
    return json_response(body, error.status_code, error.headers)


def _near(request: Request) -> str:
    """A hint at what the client may have meant."""
    paths = {getattr(route, "path", "") for route in request.app.routes} - {RESET}
    near = get_close_matches(request.url.path[:100], [p for p in paths if "{" not in p], 1)
    return f"; did you mean {near[0]}?" if near else "; the API begins at /v1/models"


class _CountResponses:
    """ASGI middleware that counts responses by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get(_ROUTE, "other")
                self._metrics.responses.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting)


def create_app(engine: AsyncEngine, config: ServerConfig | None = None) -> FastAPI:
    """The ASGI application around a running engine. ``app.state.service`` is its ``Service``.

    It never closes the engine: whoever started it does.
    """
    service = Service(engine, config or ServerConfig())
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    routes = {
        "/v1/models": ("GET", service.models),
        "/v1/models/{id:path}": ("GET", service.model),
        "/v1/completions": ("POST", service.complete),
        "/v1/chat/completions": ("POST", service.chat),
        RESET: ("POST", service.reset),
        "/health": ("GET", service.health),
        "/metrics": ("GET", service.prometheus),
    }
    for path, (method, route) in routes.items():
        app.router.add_route(path, _answering(path, route), methods=[method])
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(_CountResponses, metrics=service.metrics)
    return app
