"""A window with a prompt, an answer and a stop button, in Tk. It stays responsive while the model works.

python examples/tk_window.py [MODEL]
"""

from __future__ import annotations

import queue
import sys
import threading
import tkinter as tk

from edgespec import EdgespecError, Engine, Session

EVERY_MS = 30  # how often the window looks for new text


class Window:
    """Reads an answer on a thread; only Tk's own thread touches the window."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.busy = False  # an answer is read
        self.pieces: queue.Queue[str | None] = queue.Queue()
        self.root = tk.Tk()
        self.root.title("edgespec")
        self.prompt = tk.Entry(self.root, width=60)
        self.button = tk.Button(self.root, text="Ask", command=self.ask)
        self.output = tk.Text(self.root, wrap="word")
        for row, part in enumerate((self.prompt, self.button, self.output)):
            part.grid(row=row, sticky="nsew")
        self.prompt.bind("<Return>", lambda _event: self.ask())
        self.root.after(EVERY_MS, self.show)

    def ask(self) -> None:
        """Begin an answer, unless one is read; the button stops it."""
        if not self.busy:
            self.busy = True
            self.button.config(text="Stop", command=self.session.cancel)
            threading.Thread(target=self.read, args=(self.prompt.get(),), daemon=True).start()

    def read(self, prompt: str) -> None:
        """On the thread: pass the text of an answer to the window, then None."""
        try:
            answer = self.session.generate(prompt, max_tokens=400)
            for piece in answer.texts():
                self.pieces.put(piece)
            self.pieces.put(f"\n[{answer.result().finish_reason}]\n\n")
        except EdgespecError as error:
            self.pieces.put(f"{error.message}\n")
        finally:
            self.pieces.put(None)  # whatever happened: else the button would stay

    def show(self) -> None:
        """On Tk's thread: write what came."""
        while not self.pieces.empty():
            text = self.pieces.get()
            if text is None:
                self.busy = False
                self.button.config(text="Ask", command=self.ask)
            else:
                self.output.insert("end", text)
                self.output.see("end")
        self.root.after(EVERY_MS, self.show)


def main() -> int:
    """Load the model and open the window."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    try:
        with Engine.load(model, download=True) as engine, engine.session() as session:
            Window(session).root.mainloop()
    except (EdgespecError, tk.TclError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
