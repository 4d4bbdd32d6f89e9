"""A chat page on an engine in this process: python examples/websocket_chat/server.py

Opens http://127.0.0.1:8000/, a static page whose conversations each have a WebSocket of their
own and run in one batch. To reach it from a phone: --host 0.0.0.0 --token something, and open
http://this-machine:8000/#token=something there.
"""

import argparse
import asyncio
import contextlib
from pathlib import Path

from asyncllm import AsyncLLMEngine
from asyncllm.serving.websocket import serve

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def page(path: str) -> tuple[str, bytes] | None:
    """A file of the page; nothing outside its directory, because names are compared."""
    found = (file for file in STATIC.rglob("*") if file.suffix in TYPES)
    files = {f"/{file.relative_to(STATIC).as_posix()}": file for file in found}
    file = files.get("/index.html" if path == "/" else path)
    return None if file is None else (TYPES[file.suffix], file.read_bytes())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory or hub id; the packaged model if not given")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token", help="ask clients for this token")
    args = parser.parse_args()
    async with (
        AsyncLLMEngine(args.model) as engine,
        serve(engine, args.host, args.port, token=args.token, page=page) as server,
    ):
        print(f"{server.url}/", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
