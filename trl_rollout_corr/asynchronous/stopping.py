"""End of TRL's rollout worker."""

from contextlib import suppress
from queue import Empty
from threading import Event, Thread
from typing import Any


def drain_at_stop(worker: Any) -> None:
    """
    Empty the queues of TRL's rollout worker while it stops.

    A process ends only after its queues' pipes are empty. Nobody takes samples after the last step, so TRL would wait
    for 15 seconds, warn, and kill the process of the worker.
    """
    stop = worker.stop
    queues = [getattr(worker, name) for name in ("rollout_buffer", "metrics_queue") if hasattr(worker, name)]

    def stop_and_drain() -> None:
        stopped = Event()
        Thread(target=_drain, args=(queues, stopped), daemon=True).start()
        try:
            stop()
        finally:
            stopped.set()

    worker.stop = stop_and_drain


def _drain(queues: list[Any], stopped: Event) -> None:
    while not stopped.wait(0.05):
        for queue in queues:
            with suppress(Empty):
                while True:
                    queue.get_nowait()
