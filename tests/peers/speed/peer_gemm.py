"""Products with torch: [M, K] by [K, N] into a given output.

The second matrix lies once as [K, N] and once as [N, K] (a linear layer's weight, read transposed); the faster one counts.
"""

import torch
from clock import repeat


def prepare(case):
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[case["dtype"]]
    products = []
    for m, k, n in case["shapes"]:
        left, out = torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype)
        plain = torch.randn(k, n).to(dtype)
        layouts = {"[K, N]": plain, "[N, K]": plain.t().contiguous().t()}
        medians = {}
        for name, right in layouts.items():
            torch.mm(left, right, out=out)
            medians[name] = sorted(repeat(lambda: torch.mm(left, right, out=out), 3)["seconds"])[1]
        layout = min(medians, key=medians.get)
        products.append((m, k, n, left, layouts[layout], out, layout))

    def measure():
        cases = []
        for m, k, n, left, right, out, layout in products:
            torch.mm(left, right, out=out)
            times = repeat(lambda: torch.mm(left, right, out=out), case["repeats"])
            cases.append({"m": m, "k": k, "n": n, "layout": layout, **times})
        return {"cases": cases}

    return measure
