"""A process of the peers: sets up one case, then measures it once for every line that it reads.

The case is JSON in argv[1]: `case` names the module, the rest is its own. Answers are lines of JSON on what was standard
output; whatever the libraries print goes to standard error. Each answer has `peak_bytes`, the largest resident memory of this
process so far (VmHWM).
"""

import importlib
import json
import os
import sys


def peak_bytes():
    """VmHWM of this process, in bytes."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this needs Linux")


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    case = json.loads(sys.argv[1])

    def answer(values):
        print(json.dumps(values | {"peak_bytes": peak_bytes()}), file=answers, flush=True)

    try:
        import torch

        torch.set_num_threads(case["threads"])
        measure = importlib.import_module(f"peer_{case['case']}").prepare(case)
        answer({"ready": True, "torch": torch.__version__})
        for _ in sys.stdin:
            answer(measure())
    except Exception as error:  # told to the parent, which decides whether it can go on without this variant
        answer({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"})
        if os.environ.get("EAGLET_PEERS_TRACEBACK"):
            raise
        sys.exit(1)


if __name__ == "__main__":
    main()
