"""Scripts that use a runtime in a separate process whose whole output is checked.

Each follows a script that imports the needed names and defines ``opened()``, a new sequence of 3000 tokens, and
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
running.submit(lambda: running.forward([5] * 3000, 0))  # still running when the interpreter exits
Path(sys.argv[1] + ".steps").write_text(" ".join(steps))
"""
