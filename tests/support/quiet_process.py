"""What a process of its own does with a runtime while everything it prints is looked at.

Scripts to put behind one that imports what they name and defines ``opened()``, a new sequence of 3000 tokens, and
``steps``, a list of words.
"""

from __future__ import annotations

CANCELLED = """
sequence = opened()
sequence.forward([5] * 300, 4).argmax()
threading.Timer(0.05, sequence.cancel).start()
try:
    while True:
        sequence.forward([5] * 2600, 0)
        sequence.rewind(300)
except CancelledError:
    steps.append("cancelled")
"""
LEFT_RUNNING = """
running = opened()
running.submit(lambda: running.forward([5] * 3000, 0))  # still at work when the interpreter goes
Path(sys.argv[1] + ".steps").write_text(" ".join(steps))
"""
