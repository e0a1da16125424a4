"""Compares the speed of eaglet with torch, transformers and speculators 0.9 on the same machine.

    python -m venv venv && venv/bin/pip install speculators==0.9.0 accelerate
    cargo build --release
    venv/bin/python tests/peers/speed gemm --shape 2048x1728x576 --dtype f32,bf16
    venv/bin/python tests/peers/speed train
    venv/bin/python tests/peers/speed extract --verifier DIR
    venv/bin/python tests/peers/speed end-to-end --verifier DIR --samples chats.jsonl --steps 20

Both sides take turns in one run, each in a process of its own; see tests/README.md for what is compared and how to read it.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path

from comparison import comparison, fastest, in_turn, note, table
from processes import Peer, Unavailable, eaglet

SHAPES = ["2048x1728x576", "2048x2048x8192", "512x2048x32000", "4096x4096x4096"]
ATTENTION = ["sdpa", "eager", "simple_flex_attention"]


def middle(values):
    return sorted(values)[len(values) // 2]


def gemm(arguments):
    """GFLOP/s of products, per shape and element type."""
    lines = []
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shape or SHAPES]
    for dtype in arguments.dtype:
        note(f"gemm {dtype}")
        words = [word for shape in shapes for word in ("--shape", "x".join(map(str, shape)))]

        def ours():
            return eaglet(arguments, "gemm", *words, *element(dtype), "--repeats", arguments.repeats)

        case = {"case": "gemm", "dtype": dtype, "shapes": shapes, "repeats": arguments.repeats}
        with Peer(case, arguments) as peer:
            pairs = in_turn(arguments.rounds, peer.measure, None if arguments.peers_only else ours)
        busy = [pair[2] for pair in pairs]
        for index, (m, k, n) in enumerate(shapes):
            work = 2e-9 * m * k * n
            peers = [theirs["cases"][index] for theirs, _, _ in pairs]
            theirs = [(work / middle(one["seconds"]), one["cpu_seconds"] / work, None) for one in peers]
            mine = []
            for _, values, _ in pairs:
                if values is not None:
                    one = values["cases"][index]
                    if (one["m"], one["k"], one["n"], one["dtype"]) != (m, k, n, dtype):
                        raise SystemExit(f"eaglet bench gemm: case {index} is {one}, not {m}x{k}x{n} in {dtype}")
                    mine.append((one["gflops"]["median"], one["cpu_seconds"] / work, None))
            facts = {"dtype": dtype, "layout": peers[0]["layout"], "rounds": pairs}
            lines.append(comparison(f"gemm {m}x{k}x{n} {dtype}", "GFLOP/s", theirs, mine, busy, **facts))
    return lines


def element(dtype):
    """eaglet's words for an element type; f32 is its default."""
    return [] if dtype == "f32" else ["--dtype", dtype]


def train(arguments):
    """Tokens/s of a training step."""
    lines = []
    shape = {
        key: getattr(arguments, key)
        for key in "hidden intermediate heads kv_heads head_dim vocab draft_vocab tokens documents ttt_steps layer".split()
    }
    words = ["--device", arguments.device]
    words += [word for key, value in shape.items() for word in (f"--{key.replace('_', '-')}", value)]
    for dtype in arguments.dtype:
        note(f"train {dtype}: which of the peers' variants is fastest")
        case = {"case": "train", "dtype": dtype, "repeats": arguments.repeats, "device": arguments.device, **shape}
        variants = {
            f"{attention}{' compiled' if compiled else ''}": case | {"attention": attention, "compile": compiled}
            for attention, compiled in product(arguments.attention, arguments.compile)
        }
        best, case, tried = fastest(variants, arguments, lambda answer: middle(answer["seconds"]))

        def ours():
            return eaglet(arguments, "train", *words, *element(dtype), "--repeats", arguments.repeats)

        lines.append(tokens_per_second(arguments, "train", "step", case, ours, dtype, variant=best, tried=tried))
    return lines


def extract(arguments):
    """Tokens/s of a verifier's hidden states."""
    lines = []
    words = ["--device", arguments.device, "--verifier", arguments.verifier, "--tokens", arguments.tokens, "--documents", arguments.documents]
    for dtype in arguments.dtype:
        note(f"extract {dtype}: which of the peers' variants is fastest")
        case = {
            "case": "extract",
            "dtype": dtype,
            "device": arguments.device,
            "repeats": arguments.repeats,
            "verifier": str(arguments.verifier),
            "tokens": arguments.tokens,
            "documents": arguments.documents,
            "attention": "sdpa",
        }
        variants = {
            "documents one by one": case | {"together": False},
            "documents together": case | {"together": True},
        }
        if arguments.documents == 1 or arguments.tokens % arguments.documents:
            del variants["documents together"]  # of different lengths they would need padding
        best, case, tried = fastest(variants, arguments, lambda answer: middle(answer["seconds"]))

        def ours():
            return eaglet(arguments, "extract", *words, *element(dtype), "--repeats", arguments.repeats)

        lines.append(tokens_per_second(arguments, "extract", "row", case, ours, dtype, variant=best, tried=tried))
    return lines


def tokens_per_second(arguments, name, unit, case, ours, dtype, **facts):
    """Rounds of a case whose calls (`unit` in eaglet's JSON) are over `tokens` tokens. Memory is the GPU's where one computes."""
    with Peer(case, arguments) as peer:
        pairs = in_turn(arguments.rounds, peer.measure, None if arguments.peers_only else ours)
    theirs, mine = [], []
    for peers, values, _ in pairs:
        tokens = peers["tokens"]
        memory = "peak_bytes" if "device_bytes" not in peers else "device_bytes"
        theirs.append((tokens / middle(peers["seconds"]), peers["cpu_seconds"] / tokens, peers[memory]))
        if values is not None:
            if values["dtype"] != dtype:
                raise SystemExit(f"eaglet bench {name} computed in {values['dtype']}, not {dtype}")
            cpu = values[f"cpu_seconds_per_{unit}"] / tokens
            mine.append((values["tokens_per_s"]["median"], cpu, values[memory]))
    busy = [pair[2] for pair in pairs]
    return comparison(f"{name} {dtype}", "tokens/s", theirs, mine, busy, dtype=dtype, **facts, rounds=pairs)


def end_to_end(arguments):
    """Tokens/s from chats to a trained draft: streaming against files that are written first and then trained from."""
    dtype = arguments.dtype
    words = ["--device", arguments.device, "--verifier", arguments.verifier, "--samples", arguments.samples]
    words += ["--tokens-per-row", arguments.tokens_per_row, "--steps", arguments.steps, *arguments.eaglet_argument]
    tokens = arguments.steps * arguments.tokens_per_row

    def ours():
        nonlocal tokens
        values = eaglet(arguments, "end-to-end", *words)
        tokens = values["tokens"]
        return values

    def peers():
        result = {"seconds": 0.0, "with_imports_seconds": 0.0, "cpu_seconds": 0.0, "peak_bytes": 0, "stages": {}}
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
            for stage in ("extract", "train"):
                case = {
                    "case": "end_to_end",
                    "stage": stage,
                    "folder": str(Path(folder) / "data"),
                    "dtype": dtype,
                    "verifier": str(arguments.verifier),
                    "samples": str(arguments.samples),
                    "tokens": tokens,
                    "tokens_per_row": arguments.tokens_per_row,
                    "draft_vocab": arguments.draft_vocab,
                    "learning_rate": arguments.learning_rate,
                    "ttt_steps": arguments.ttt_steps,
                    "attention": arguments.attention,
                    "workers": arguments.workers,
                }
                with Peer(case, arguments) as peer:
                    values = peer.measure()
                    result["with_imports_seconds"] += values["seconds"] + peer.start_seconds
                note(f"  peers, {stage}: {values['seconds']:.1f} s, {values['tokens']} tokens")
                result["stages"][stage] = values
                result["tokens"] = values["tokens"]
                result["seconds"] += values["seconds"]
                result["cpu_seconds"] += values["cpu_seconds"]
                result["peak_bytes"] = max(result["peak_bytes"], values["peak_bytes"])
        return result

    pairs = in_turn(arguments.rounds, peers, None if arguments.peers_only else ours)
    theirs, mine = [], []
    for peer, values, _ in pairs:
        theirs.append((peer["tokens"] / peer["seconds"], peer["cpu_seconds"] / peer["tokens"], peer["peak_bytes"]))
        if values is not None:
            count, process = values["tokens"], values["process"]
            rate = count / values["wall_seconds"]["median"]
            mine.append((rate, process["cpu_seconds"] / count, values.get("peak_bytes") or process["peak_bytes"]))
    busy = [pair[2] for pair in pairs]
    return [comparison(f"end-to-end {dtype}", "tokens/s", theirs, mine, busy, dtype=dtype, rounds=pairs)]


def common(dtypes):
    """The options of all cases."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--eaglet", default="target/release/eaglet", help="its binary")
    parser.add_argument("--peers-only", action="store_true", help="measure the peers alone")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each side (default: all cores)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both sides")
    parser.add_argument("--preload", type=commas, default=[], help="libraries that the peers' processes preload, with commas")
    parser.add_argument("--json", action="store_true", help="everything, as JSON, to standard output; the table to standard error")
    parser.add_argument("--verbose", action="store_true", help="show what the peers print")
    if len(dtypes) == 1:
        parser.add_argument("--dtype", choices=["f32", "bf16"], default=dtypes[0], help="what the peers compute in")
    else:
        parser.add_argument("--dtype", type=commas, default=dtypes, help="f32, bf16 or both, with a comma")
        parser.add_argument("--repeats", type=int, default=3, help="calls in a turn; their median counts")
    return parser


def options():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = parser.add_subparsers(required=True)
    both = ["f32", "bf16"]
    model = dict(type=Path, default=real_verifier(), help="folder of a model (default: of EAGLET_REAL_DIR)")

    case = cases.add_parser("gemm", parents=[common(both)], help=gemm.__doc__)
    case.add_argument("--shape", action="append", help=f"MxKxN, may be repeated (default: {', '.join(SHAPES)})")
    case.set_defaults(run=gemm)

    case = cases.add_parser("train", parents=[common(both)], help=train.__doc__)
    sizes = dict(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, draft_vocab=8192)
    for name, value in (sizes | dict(tokens=1024, documents=1, ttt_steps=3)).items():
        case.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    case.add_argument("--layer", choices=["llama", "qwen3"], default="llama")
    case.add_argument("--attention", type=commas, default=ATTENTION, help=f"the peers' (default: {','.join(ATTENTION)})")
    case.add_argument("--compile", type=switches, default=[False, True], help="torch.compile: off, on or both (default: off,on)")
    case.add_argument("--device", default="cpu", help="cpu, or cuda:N: of both sides")
    case.set_defaults(run=train)

    case = cases.add_parser("extract", parents=[common(both)], help=extract.__doc__)
    case.add_argument("--verifier", **model)
    case.add_argument("--tokens", type=int, default=1024, help="of all documents together")
    case.add_argument("--documents", type=int, default=4)
    case.add_argument("--device", default="cpu", help="cpu, or cuda:N: of both sides")
    case.set_defaults(run=extract)

    case = cases.add_parser("end-to-end", parents=[common(["f32"])], help=end_to_end.__doc__)
    case.add_argument("--verifier", **model)
    case.add_argument("--samples", type=Path, required=True, help="chats, as eaglet reads them")
    case.add_argument("--tokens-per-row", type=int, default=1024)
    case.add_argument("--steps", type=int, default=20)
    case.add_argument("--draft-vocab", type=int, default=8192)
    case.add_argument("--learning-rate", type=float, default=1e-3)
    case.add_argument("--ttt-steps", type=int, default=3)
    case.add_argument("--attention", choices=ATTENTION, default="sdpa", help="the peers'")
    case.add_argument("--workers", type=int, default=1, help="processes that load files for the peers' trainer")
    case.add_argument("--scratch", type=Path, help="folder for the peers' files (default: the system's)")
    case.add_argument("--eaglet-argument", action="append", default=[], help="one more word for eaglet, may be repeated")
    case.set_defaults(run=end_to_end)
    return parser.parse_args()


def commas(text):
    return text.split(",")


def switches(text):
    return [{"off": False, "on": True}[word] for word in text.split(",")]


def real_verifier():
    """The model that the tests use where there is one."""
    folder = os.environ.get("EAGLET_REAL_DIR")
    return Path(folder) / "models" / "smollm2-135m" if folder else None


def main():
    arguments = options()
    if "verifier" in arguments and arguments.verifier is None:
        raise SystemExit("which verifier? give --verifier DIR, or set EAGLET_REAL_DIR")
    if not arguments.peers_only and not Path(arguments.eaglet).exists():
        raise SystemExit(f"{arguments.eaglet}: not there; build it with `cargo build --release`, or give --peers-only")
    try:
        lines = arguments.run(arguments)
    except Unavailable as why:
        raise SystemExit(str(why)) from None
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "speculators")}
    if arguments.json:
        print(table(lines), file=sys.stderr)
        words = {key: value for key, value in vars(arguments).items() if key != "run"}
        print(json.dumps({"versions": versions, "arguments": words, "comparisons": lines}, default=str, indent=2))
    else:
        print(table(lines))
        print("\n" + ", ".join(f"{name} {version}" for name, version in versions.items()) + f"; {arguments.threads} threads")
        for line in lines:
            if "variant" in line:
                print(f"{line['name']}: the peers' fastest is {line['variant']}")


if __name__ == "__main__":
    main()
