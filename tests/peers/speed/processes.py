"""Processes of both sides: how they are started, and what is read from them."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")


class Unavailable(Exception):
    """A side cannot do this here; the message says why."""


class Peer:
    """A process of the peers that has one case set up, and measures it when asked."""

    def __init__(self, case, arguments):
        environment = os.environ | {
            "OMP_NUM_THREADS": str(arguments.threads),
            "MKL_NUM_THREADS": str(arguments.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if arguments.preload:
            environment["LD_PRELOAD"] = ":".join(arguments.preload)
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, CHILD, json.dumps(case | {"threads": arguments.threads})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if arguments.verbose else self.log,
            text=True,
            env=environment,
        )
        start = time.perf_counter()
        try:
            self.torch = self._answer()["torch"]
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - start

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            tail = self.log.read().strip().splitlines()[-1:]
            raise Unavailable(f"its process ended with {self.process.wait()}: {' '.join(tail)}")
        answer = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def measure(self):
        """What the case measures, once more; with `peak_bytes` of the process so far."""
        self.process.stdin.write("measure\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def eaglet(arguments, *words):
    """Runs `eaglet bench WORDS --threads N --json`: its JSON, with what the kernel counted: `process`.

    Raises Unavailable if it fails; its own words are on standard error.
    """
    command = [arguments.eaglet, "bench", *map(str, words), "--threads", str(arguments.threads), "--json"]
    with tempfile.TemporaryFile("w+") as out:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=None)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        if process.returncode:
            raise Unavailable(f"{' '.join(command)}: ended with {process.returncode}")
        out.seek(0)
        values = json.load(out)
    values["process"] = {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,  # of its waited-for children, too
        "peak_bytes": usage.ru_maxrss * 1024,  # of the largest process
    }
    return values


def load():
    """Load average of the last minute."""
    return os.getloadavg()[0]
