"""Processes that do one job after another, and stop at a time. It imports nothing heavy, because each of them does."""

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

Job = list[dict]
MakeRun = Callable[[], Callable[[Job], list[dict]]]


class Worker:
    """A process, and the job that it has."""

    def __init__(self, context: Any, make_run: MakeRun):
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, make_run), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job = []
        self.started = 0.0

    def begin(self, job: Job) -> None:
        self.job, self.started = job, time.perf_counter()
        self.channel.send(job)

    def finish(self) -> tuple[Job, list[dict], str | None]:
        """The job, its rows, or what went wrong, after which the process has ended."""
        try:
            rows, error = self.channel.recv()
        except (EOFError, ConnectionError):
            rows, error = [], "the process has ended"
        seconds = (time.perf_counter() - self.started) / len(self.job)
        job, self.job = self.job, []
        return job, [item | row | {"seconds": seconds} for item, row in zip(job, rows)], error

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(5)
        self.process.kill()
        self.channel.close()


def _work(channel: Any, make_run: MakeRun) -> None:
    run = make_run()
    while True:
        job = channel.recv()
        try:
            channel.send((run(job), None))
        except Exception:  # told to who asked; what it left on a GPU is not to be trusted
            channel.send(([], traceback.format_exc()))
            return


def run_jobs(
    next_job: Callable[[list[Job]], Job],
    finished: Callable[[Job, list[dict], str | None], None],
    make_run: MakeRun,
    processes: int,
    minutes: float | None = None,
) -> None:
    """Do jobs until there is none, each in one of the processes.

    Args:
        next_job: what may begin beside the jobs that run, empty where nothing may.
        finished: told a job, its rows, and what went wrong if anything did.
        make_run: called in each process, gives what makes the rows of a job.
        minutes: after which what still runs is stopped and lost.
    """
    context = multiprocessing.get_context("spawn")
    started = time.perf_counter()
    workers = [Worker(context, make_run) for _ in range(processes)]
    try:
        while True:
            for worker in workers:
                if not worker.job and (job := next_job([other.job for other in workers if other.job])):
                    worker.begin(job)
            channels = {worker.channel: worker for worker in workers if worker.job}
            left = None if minutes is None else 60 * minutes - (time.perf_counter() - started)
            if not channels or (left is not None and left <= 0):
                return
            for channel in connection.wait(list(channels), left):
                worker = channels[channel]  # type: ignore[index]
                job, rows, error = worker.finish()
                print(
                    f"{time.perf_counter() - started:.0f} s: {job[0]}, {len(job)} in all: {error or 'done'}", flush=True
                )
                finished(job, rows, error)
                if error is not None:
                    worker.stop()
                    workers[workers.index(worker)] = Worker(context, make_run)
    finally:
        for worker in workers:
            worker.stop()
