"""A stand-in for vLLM's stream whose timing is known: ``python ticking.py INTERVAL FIRST`` (seconds).

Every answer's first token comes FIRST after its request, each other one INTERVAL after the one before. It prints its
port. ``GET /times`` gives, as this process saw them, times to the first token and gaps between tokens, seconds.
"""

import asyncio
import json
import sys
import time
from functools import partial

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def serve(
    interval: float,
    first: float,
    times: dict[str, list[float]],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """All requests of one connection."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if lengths:
                payload = json.loads(await reader.readexactly(int(lengths[0].split(b":")[1])))
                await answer(payload, interval, first, times, writer)
            else:
                body = json.dumps(times).encode() if head.startswith(b"GET /times") else b""
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def answer(
    payload: dict[str, object],
    interval: float,
    first: float,
    times: dict[str, list[float]],
    writer: asyncio.StreamWriter,
) -> None:
    """One stream, on a schedule of its own."""
    writer.write(HEAD)
    count, sent = int(str(payload["max_tokens"])), time.perf_counter()
    due = sent + first
    for number in range(count):
        await asyncio.sleep(due - time.perf_counter())
        choice: dict[str, object] = {"token_ids": [number], "finish_reason": "length" if number == count - 1 else None}
        if number == 0:
            choice["prompt_token_ids"] = payload["prompt"]
        event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        now = time.perf_counter()
        times["gaps" if number else "first"].append(now - sent)
        sent, due = now, due + interval
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    await writer.drain()


async def main(interval: float, first: float) -> None:
    """Serve until the process is ended."""
    server = await asyncio.start_server(
        partial(serve, interval, first, {"first": [], "gaps": []}), "127.0.0.1", 0, backlog=256
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), float(sys.argv[2])))
