"""Times repeated calls."""

import time


def repeat(call, repeats):
    """Calls `repeats` times; the seconds of each call, and the CPU seconds of this process, all threads, per call."""
    seconds, cpu = [], time.process_time()
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "cpu_seconds": (time.process_time() - cpu) / repeats}
