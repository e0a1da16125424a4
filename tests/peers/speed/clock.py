"""Times repeated calls."""

import time

import torch


def repeat(call, repeats, device="cpu"):
    """Calls `repeats` times; the seconds of each call, and the CPU seconds of this process, all threads, per call.

    A GPU is waited for after each call; then the bytes that it held at most are among what is returned.
    """
    synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
    synchronize()
    seconds, cpu = [], time.process_time()
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - start)
    times = {"seconds": seconds, "cpu_seconds": (time.process_time() - cpu) / repeats}
    return times if device == "cpu" else times | {"device_bytes": torch.cuda.max_memory_allocated()}
