"""Embed edgespec in an application: load a model once, stream events, cancel from another thread.

python examples/embed.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys
import threading

from edgespec import EdgespecError, Engine, Limits, Loading


def stream(engine: Engine) -> None:
    """Hold a conversation of two turns. The second turn reuses the first turn's KV cache."""
    with engine.session(system="You answer in one short sentence.") as session:
        for prompt in ("What is a linked list?", "And a doubly linked one?"):
            answer = session.generate(prompt, max_tokens=48)
            for piece in answer.texts():
                print(piece, end="", flush=True)
            stats = answer.result().stats
            print(f"\n  [{stats.emitted_tokens} tokens, {stats.cached_tokens} of the prompt were cached]")


def cancel_from_another_thread(engine: Engine) -> None:
    """Stop an answer from another thread, as a stop button does."""
    with engine.session() as session:
        answer = session.generate("Write a long story about a fox and a bear.", max_tokens=1500)
        next(answer.texts())  # the answer has begun
        threading.Timer(0.5, session.cancel).start()
        done = answer.result()
        print(f"stopped: {done.finish_reason}, {done.stats.emitted_tokens} tokens were written")


async def stream_async(engine: Engine) -> None:
    """Stream a sampled answer in an asyncio event loop. The seed makes the text reproducible."""
    with engine.session() as session:
        async for piece in session.generate("Name a colour.", max_tokens=16, temperature=0.7, seed=1).atexts():
            print(piece, end="", flush=True)
    print()


def main() -> int:
    """Load a model, downloading it if it is missing, and run the three examples."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

    def progress(event: object) -> None:
        if isinstance(event, Loading) and event.fraction is None:
            print(event.stage, file=sys.stderr)

    try:
        with Engine.load(
            model, context=2048, limits=Limits(max_memory_bytes=4 * 2**30), download=True, progress=progress
        ) as engine:
            stream(engine)
            cancel_from_another_thread(engine)
            asyncio.run(stream_async(engine))
    except EdgespecError as error:
        print(f"{error.message}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
