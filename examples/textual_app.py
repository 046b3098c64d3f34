"""A chat in the terminal with Textual: Enter asks, Escape stops the answer. The screen never freezes.

python examples/textual_app.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from textual import work
from textual.app import App, ComposeResult
from textual.widgets import Footer, Input, Log

from edgespec import EdgespecError, Engine, Session


class Chat(App[None]):
    """Reads events in Textual's own event loop: they occupy no thread."""

    BINDINGS = [("escape", "stop", "Stop the answer")]  # noqa: RUF012

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def compose(self) -> ComposeResult:
        """The answers above, the prompt below."""
        yield Log(id="answers")
        yield Input(placeholder="Ask something")
        yield Footer()

    def on_mount(self) -> None:
        """Begin in the prompt."""
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Answer what was entered."""
        self.answer(event.value)
        event.input.clear()

    @work(exclusive=True)  # a further prompt cancels the running answer
    async def answer(self, prompt: str) -> None:
        """Show one answer as it is written."""
        log = self.query_one(Log)
        log.write_line(f"> {prompt}")
        generation = None
        try:
            generation = await asyncio.to_thread(self.session.generate, prompt, max_tokens=400)
            async for piece in generation.atexts():
                log.write(piece)
        except EdgespecError as error:
            log.write(error.message)
        finally:
            if generation is not None:
                await generation.aclose()
        log.write_line("")

    def action_stop(self) -> None:
        """End the answer in progress; its text stays."""
        self.session.cancel()


def main() -> int:
    """Load the model and open the screen."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    try:
        with Engine.load(model, download=True) as engine, engine.session() as session:
            Chat(session).run()
    except EdgespecError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
