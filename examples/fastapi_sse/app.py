"""An endpoint that streams server-sent events: uvicorn --app-dir examples/fastapi_sse app:app

Then: curl -N 'http://127.0.0.1:8000/stream?prompt=Tell+me+a+story+about+a+fox.'
Needs: pip install asyncllm fastapi uvicorn
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

from asyncllm import AsyncLLMEngine, EngineOverloadedError, RequestError, TokenStream

engine = AsyncLLMEngine()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)


async def events(stream: TokenStream) -> AsyncIterator[str]:
    # A client that goes away cancels this generator, and leaving the block aborts the request.
    async with stream:
        try:
            async for delta in stream:
                yield f"data: {json.dumps({'text': delta.text})}\n\n"
        except RequestError as error:
            yield f"event: error\ndata: {json.dumps({'message': str(error)})}\n\n"
            return
    yield f"event: end\ndata: {json.dumps({'finish_reason': stream.finish_reason})}\n\n"


@app.get("/stream")
async def stream(prompt: str, max_tokens: int = 200) -> StreamingResponse:
    try:
        tokens = engine.chat([{"role": "user", "content": prompt}], max_tokens=max_tokens)
    except EngineOverloadedError as error:
        raise HTTPException(503, headers={"Retry-After": f"{error.retry_after:.0f}"}) from error
    except RequestError as error:
        raise HTTPException(400, str(error)) from error
    return StreamingResponse(events(tokens), media_type="text/event-stream")


@app.get("/stats")
async def stats() -> dict[str, float]:
    now = engine.stats()
    return {"running": now.num_running, "waiting": now.num_waiting, "kv": now.kv_cache_usage}
