"""What the routes do: read a request, start it in the engine, and answer, whole or as a stream."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ebbtide.errors import InputError
from ebbtide.server.answers import DONE, Answer, ChatAnswer, CompletionAnswer
from ebbtide.server.body import read_json
from ebbtide.server.config import ServerConfig
from ebbtide.server.errors import RequestError, ServerFailure, describe, json_response
from ebbtide.server.fields import check_names, wrong_type
from ebbtide.server.generation import ClientGone, Generation, encode_messages, encode_prompts
from ebbtide.server.metrics import CONTENT_TYPE, Metrics, RequestTimer
from ebbtide.server.requests import Options, parse_chat, parse_completion

if TYPE_CHECKING:
    from ebbtide.engine.async_engine import AsyncEngine

log = logging.getLogger("ebbtide.server")

STOPPING = "the server is shutting down"


class Service:
    """One engine behind HTTP, and the generations it is at work on."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.metrics = Metrics(engine)
        self.started = int(time.time())
        self.stopping = False
        self._active: set[Generation] = set()

    @property
    def unfinished(self) -> int:
        """Requests that are being answered."""
        return len(self._active)

    def stop(self) -> None:
        """Refuse new requests from now on."""
        self.stopping = True

    def end_all(self) -> None:
        """End what is still running with an error."""
        for generation in self._active:
            generation.fail(ServerFailure(STOPPING, code="shutting_down", status=503))

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        timer = RequestTimer(self.metrics)
        wanted = parse_completion(await self._body(request))
        self._check_model(wanted.options.model)
        prompts = await encode_prompts(self.engine.tokenizer, wanted.prompts)
        return await self._answer(request, prompts, wanted.options, CompletionAnswer, timer)

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        timer = RequestTimer(self.metrics)
        wanted = parse_chat(await self._body(request))
        self._check_model(wanted.options.model)
        prompt = await encode_messages(self.engine.tokenizer, wanted.messages)
        try:
            return await self._answer(request, [prompt], wanted.options, ChatAnswer, timer)
        except InputError as error:
            if error.field == "prompt":
                error.field = "messages"
            raise

    async def _body(self, request: Request) -> dict[str, Any]:
        if self.stopping:
            raise ServerFailure(STOPPING, code="shutting_down", status=503)
        return await read_json(request, self.config)

    def _check_model(self, name: str) -> None:
        if name != self.engine.model_name:
            raise RequestError(
                f"there is no model {name!r} here; this server has {self.engine.model_name!r}",
                "model",
                code="model_not_found",
                status=404,
            )

    async def _answer(
        self,
        request: Request,
        prompts: list[list[int]],
        options: Options,
        shape: type[Answer],
        timer: RequestTimer,
    ) -> Response:
        generation = await Generation.start(self.engine, prompts, options, timer)
        self._active.add(generation)
        answer = shape(self.engine.tokenizer, generation, self.engine.model_name)
        if options.stream:
            return EventStream(self, generation, answer)
        watcher = generation.end_when_gone(request.receive)
        try:
            return json_response(await answer.whole(), headers={"x-request-id": answer.id})
        finally:
            watcher.cancel()
            await self.release(generation)

    async def release(self, generation: Generation) -> None:
        """End a generation, however far it got."""
        self._active.discard(generation)
        await generation.close()

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``."""
        self._check_model(request.path_params["id"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.engine.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "ebbtide",
            "max_length": self.engine.max_length,
        }

    async def reset(self, request: Request) -> Response:
        """``POST /v1/kv/reset``: empty the tiers named, or with ``{}`` all of them, and the device."""
        body = await self._body(request)
        check_names(body, ("tiers",))
        tiers = body.get("tiers")
        if tiers is not None and not (
            isinstance(tiers, list) and all(isinstance(name, str) for name in tiers)
        ):
            raise wrong_type("tiers", "an array of names", tiers)
        self.engine.reset(tiers)
        return json_response({"object": "kv.reset", "tiers": tiers})

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 while requests are welcome."""
        if self.stopping:
            raise ServerFailure(STOPPING, code="shutting_down", status=503)
        try:
            self.engine.stats()
        except Exception as error:
            raise ServerFailure(
                "the engine does not answer", code="engine_error", status=503
            ) from error
        return json_response({"status": "ok", "model": self.engine.model_name})

    async def prometheus(self, request: Request) -> Response:
        """``GET /metrics``."""
        tiers = await self.engine.tier_stats()
        return Response(self.metrics.render(tiers), media_type=CONTENT_TYPE)


class EventStream(Response):
    """Server-sent events. Closes the generation in every case, also if the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, generation: Generation, answer: Answer) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-request-id": answer.id})
        del self.headers["content-length"]
        self._service = service
        self._generation = generation
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = self._generation.end_when_gone(receive)
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            last = await self._stream(send)
            await send({"type": "http.response.body", "body": last})
        except ClientGone:
            pass
        finally:
            watcher.cancel()
            await self._service.release(self._generation)

    async def _stream(self, send: Send) -> bytes:
        """Send all but the last piece, and return that one."""
        try:
            async for batch in self._generation.batches():
                piece = self._answer.chunks(batch)
                if piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ClientGone:
            raise
        except Exception as error:
            return _error_event(error)
        if self._generation.options.include_usage:
            return self._answer.usage_chunk() + DONE
        return DONE


def _error_event(error: Exception) -> bytes:
    if not isinstance(error, InputError | ServerFailure):
        log.error("a stream failed", exc_info=error)
    return f"data: {json.dumps(describe(error)[1])}\n\n".encode()
