"""The worker process: loads one model, and runs its Sequences for the parent at the other end of two pipes.

Started as ``python -m edgespec.runtimes.process.worker``; a frozen application starts itself with a command that
calls ``main``. The worker ends with its standard input, whatever is still being computed: nothing here outlives the
parent.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import signal
import threading
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from io import BufferedIOBase
from typing import Any, NoReturn

import numpy as np

from edgespec.errors import (
    ClosedError,
    EdgespecError,
    InvalidRequestError,
    NonFiniteLogitsError,
    StaleRowsError,
    WorkerLostError,
)
from edgespec.files.checked import to_json
from edgespec.files.model_file import read_model_file
from edgespec.interfaces.model import Model, Sequence
from edgespec.interfaces.rows import Rows
from edgespec.runtimes.process.draws import describe_drawn, read_request
from edgespec.runtimes.process.frames import (
    Frame,
    LoadRequest,
    describe_error,
    encode_frame,
    ids_bytes,
    read_frame,
    read_load_request,
    scores_bytes,
)
from edgespec.runtimes.table import RUNTIMES

Loader = Callable[[LoadRequest], Model]
_Answer = tuple[dict[str, Any], bytes]


def _load(request: LoadRequest) -> Model:
    runtime = RUNTIMES.get(request.runtime)
    if runtime is None:
        raise InvalidRequestError(f"no runtime {request.runtime!r}", hint=f"one of {', '.join(RUNTIMES)}")
    settings, file = runtime.read_settings(request.settings), read_model_file(request.path, request.others)
    name, sha256 = request.name or file.name, request.sha256 or file.identity
    return runtime.load(replace(file, name=name, identity=sha256), settings)


def main(arguments: abc.Sequence[str] | None = None) -> NoReturn:
    """Serve until standard input ends.

    ``--loader MODULE:FUNCTION`` loads with that function instead of the requested runtime. The command line comes
    from the process that starts the worker, so no file or frame can choose the function.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and then decides about this process
    parser = argparse.ArgumentParser(prog="edgespec.runtimes.process.worker")
    parser.add_argument("--loader", metavar="MODULE:FUNCTION", help="load models with this function")
    incoming, outgoing = _take_pipes()
    # To stderr, whose end the parent keeps: what a native library complained about before it died.
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    own_loader: str | None = parser.parse_args(arguments).loader
    _Server(outgoing, None if own_loader is None else _find_loader(own_loader)).serve(incoming)


def _take_pipes() -> tuple[BufferedIOBase, int]:
    """This process's ends of the two pipes, under numbers that no other code writes to.

    Native libraries may print to file 1, and some read from 0: from here on file 1 is stderr, and file 0 is empty.
    """
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    os.fdopen(outgoing, "wb", buffering=0, closefd=False)  # makes the file binary on Windows
    return os.fdopen(incoming, "rb"), outgoing


def _find_loader(name: str) -> Loader:
    module, _, function = name.partition(":")
    loader: Loader = getattr(importlib.import_module(module), function)
    return loader


class _Server:
    """Reads requests on the main thread, so that a cancel, and the parent's end, always get through."""

    def __init__(self, outgoing: int, loader: Loader | None) -> None:
        self._outgoing = outgoing
        self._write_lock = threading.Lock()
        self._loader = loader
        self._model: Model | None = None
        self._served: dict[int, _Served] = {}

    def serve(self, incoming: BufferedIOBase) -> NoReturn:
        status = 0
        try:
            while (frame := read_frame(incoming)) is not None:
                self._handle(frame)
        except (WorkerLostError, KeyError) as error:
            os.write(2, f"the parent's request is not valid: {error}\n".encode())
            status = 70  # EX_SOFTWARE of sysexits.h
        # Not sys.exit: that would wait for forwards in flight, and for native destructors.
        os._exit(status)

    def _handle(self, frame: Frame) -> None:
        operation = frame.text("op")
        if operation == "cancel":
            self._served[frame.integer("sequence")].cancel(frame.integer("forward"))
        elif operation == "close":
            self._served.pop(frame.integer("sequence")).sequence.close()
        elif operation in {"load", "open"}:
            # Both take long: a separate thread keeps this thread reading.
            job = functools.partial(self._load if operation == "load" else self._open, frame)
            threading.Thread(target=self._answer, args=(frame.integer("id"), job), daemon=True).start()
        else:
            served = self._served[frame.integer("sequence")]
            number = frame.integer("id")
            job = functools.partial(served.jobs[operation], frame)
            if operation == "forward":
                served.expect(number)
            try:
                served.sequence.submit(functools.partial(self._answer, number, job))
            except ClosedError as error:
                self._write(encode_frame({"id": number, "error": describe_error(error)}))

    def _answer(self, number: int, job: Callable[[], _Answer]) -> None:
        try:
            header, body = job()
            frame = encode_frame({"id": number, **header}, body)
        except Exception as error:  # the parent decides what is still valid after the error
            if not isinstance(error, EdgespecError):
                logging.getLogger(__name__).exception("a request failed")
            frame = encode_frame({"id": number, "error": describe_error(error)})
        self._write(frame)

    def _write(self, frame: bytes) -> None:
        view = memoryview(frame)
        try:
            with self._write_lock:
                while view:
                    view = view[os.write(self._outgoing, view) :]
        except OSError:
            os._exit(0)  # the parent no longer reads

    def _load(self, frame: Frame) -> _Answer:
        self._model = (self._loader or _load)(read_load_request(frame.header.get("load")))
        return {"facts": to_json(self._model.facts)}, b""

    def _open(self, frame: Frame) -> _Answer:
        if self._model is None:
            raise ClosedError("no model is loaded")
        sequence = self._model.open(frame.integer("context_length"))
        self._served[frame.integer("sequence")] = _Served(sequence)
        return {}, b""


class _Served:
    """One Sequence and the rows of its last forward. Its jobs run on the Sequence's thread."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.jobs: abc.Mapping[str, Callable[[Frame], _Answer]] = {
            "forward": self._forward,
            "rewind": self._rewind,
            "row": self._row,
            "top_k": self._top_k,
            "draw": self._draw,
        }
        self._rows: Rows | None = None
        self._rows_of = -1
        self._lock = threading.Lock()
        self._in_flight: int | None = None
        self._cancelled = False

    def expect(self, number: int) -> None:
        """Announce the forward with that number, before it is queued: it can be cancelled from now on."""
        with self._lock:
            self._in_flight = number

    def cancel(self, number: int) -> None:
        """End that forward if it has not ended yet. Later forwards are not affected."""
        with self._lock:
            if self._in_flight == number:
                self._cancelled = True
                self.sequence.cancel()

    def _over(self) -> None:
        with self._lock:
            self._in_flight = None
            if self._cancelled:
                self._cancelled = False
                self.sequence.reset_cancel()

    def _forward(self, frame: Frame) -> _Answer:
        number, count = frame.integer("id"), frame.integer("rows")
        self._rows = None
        try:
            rows = self.sequence.forward(frame.ids().tolist(), count)
        finally:
            self._over()
        best = np.zeros(count, dtype=np.int64)
        not_finite = []
        for index in range(count):
            try:
                best[index] = rows.argmax_row(index)
            except NonFiniteLogitsError as error:
                not_finite.append([index, error.message])
        self._rows, self._rows_of = rows, number
        return {"length": self.sequence.length, "not_finite": not_finite}, ids_bytes(best)

    def _rewind(self, frame: Frame) -> _Answer:
        self._rows = None
        self.sequence.rewind(frame.integer("length"))
        return {"length": self.sequence.length}, b""

    def _scored(self, frame: Frame) -> Rows:
        if self._rows is None or self._rows_of != frame.integer("forward"):
            raise StaleRowsError("these rows were overwritten by a later forward, rewind or close")
        return self._rows

    def _row(self, frame: Frame) -> _Answer:
        return {}, scores_bytes(self._scored(frame).logits(frame.integer("index")))

    def _draw(self, frame: Frame) -> _Answer:
        rows = self._scored(frame).first(frame.integer("scores"))
        return describe_drawn(rows.draw(frame.integer("index"), read_request(frame)))

    def _top_k(self, frame: Frame) -> _Answer:
        ids, scores = self._scored(frame).top_k(frame.integer("k"))
        return {}, ids_bytes(ids) + scores_bytes(scores)


if __name__ == "__main__":
    main()
