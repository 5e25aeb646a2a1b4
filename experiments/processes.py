"""The parts of an experiment in several processes, which share the cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import Empty
from typing import Any, Protocol

import torch
from threadpoolctl import threadpool_limits

from .progress import seldom
from .training import Report

WORKERS_HELP = "processes that share the cores, and the groups of splits whose networks are trained together"


class Part(Protocol):
    """What a process does at a time."""

    @property
    def name(self) -> str: ...


def in_processes(
    parts: Sequence[Part], rows_of: Callable[..., Iterable[Any]], workers: int, say: Report
) -> Iterator[Any]:
    """What `rows_of(part, report=...)` yields for each part, as it comes; with one worker in this process."""
    if workers == 1:
        for part in parts:
            yield from rows_of(part, report=say)
        return
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    waiting, running = list(reversed(parts)), {}
    while waiting or running:
        while waiting and len(running) < workers:
            part = waiting.pop()
            running[part] = context.Process(target=_work, args=(part, rows_of, workers, queue), daemon=True)
            running[part].start()
        for part, process in running.items():
            if process.exitcode:
                raise SystemExit(
                    f"the process of {part.name} ended with exit code {process.exitcode}, and the run with it"
                )
        try:
            kind, content = queue.get(timeout=1.0)
        except Empty:
            continue
        if kind == "end":
            running.pop(content).join()
        elif kind == "row":
            yield content
        else:
            say(content)


def _work(part: Part, rows_of: Callable[..., Iterable[Any]], workers: int, queue: Any) -> None:
    """A process of its own, on its share of the cores; it ends with the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started it
    parent = multiprocessing.parent_process()
    say = seldom(lambda text: queue.put(("status", text)))

    def report(text: str) -> None:
        if parent is not None and not parent.is_alive():
            sys.exit("the run was killed")
        say(text)

    cores = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(cores)
    with threadpool_limits(cores):
        for cells in rows_of(part, report=report):
            queue.put(("row", cells))
    queue.put(("end", part))
