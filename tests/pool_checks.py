"""Jobs of the tests of `benchmarks.pool`; the processes import this and nothing heavy."""

import os
import time


def rows_of(job: list[dict]) -> list[dict]:
    """A row an item: how many there are. A job of three fails, some end their process or take long."""
    if job[0]["kind"] == "exit":
        os._exit(1)
    if job[0]["kind"] == "sleep":
        time.sleep(60)
    if len(job) == 3:
        raise ValueError("three are too many")
    return [{"together": len(job)} for _ in job]
