"""Rounds of both sides in turn, and what is said about them."""

import statistics
import sys

from processes import Peer, Unavailable, load


def spread(values):
    """Median, smallest and largest; None without values."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def fastest(variants, arguments, seconds_of):
    """Starts the peers with each variant, once; the fastest one's name and case, and what each gave.

    Each is a process of its own, so that a variant's memory is its own. A variant alone is not tried.
    """
    tried = []
    if len(variants) == 1:
        return *next(iter(variants.items())), tried
    for name, case in variants.items():
        try:
            with Peer(case, arguments) as peer:
                answer = peer.measure()
                tried.append({"name": name, "seconds": seconds_of(answer), "peak_bytes": answer["peak_bytes"]})
                note(f"  {name}: {tried[-1]['seconds']:.3g} s, peak {megabytes(answer['peak_bytes'])}")
        except Unavailable as why:
            tried.append({"name": name, "unavailable": str(why)})
            note(f"  {name}: {why}")
    able = [variant for variant in tried if "seconds" in variant]
    if not able:
        raise SystemExit("the peers can run none of these variants here; --verbose shows what they print")
    best = min(able, key=lambda variant: variant["seconds"])["name"]
    return best, variants[best], tried


def in_turn(rounds, peer, ours):
    """Calls both sides `rounds` times, the one that begins changes; pairs of what they gave, and the load at each round.

    `ours` may be None: then only the peers are measured. So they are if eaglet cannot do it.
    """
    pairs = []
    if ours is not None:
        try:
            ours()  # files are in memory then, as they are for the peers
        except Unavailable as why:
            note(f"  {why}: the peers are measured alone")
            ours = None
    for number in range(rounds):
        busy = load()
        if ours is None:
            pairs.append((peer(), None, busy))
        elif number % 2:
            mine = ours()
            pairs.append((peer(), mine, busy))
        else:
            theirs = peer()
            pairs.append((theirs, ours(), busy))
        note(f"  round {number + 1} of {rounds}, load {busy:.1f}")
    return pairs


def side(rates, cpu_seconds, peak_bytes):
    """One side of a comparison. `cpu_seconds` are per unit of the rate."""
    return {"rate": spread(rates), "cpu_seconds_per_unit": spread(cpu_seconds), "peak_bytes": peak_bytes}


def comparison(name, unit, theirs, ours, busy, **facts):
    """A line of the table. `theirs` and `ours` are per round (rate, CPU seconds per unit, peak bytes or None)."""
    result = {"name": name, "unit": unit, **facts, "load": spread(busy)}
    for key, rounds in (("peer", theirs), ("eaglet", ours)):
        if rounds:
            rates, cpu, peaks = zip(*rounds)
            result[key] = side(rates, cpu, max((peak for peak in peaks if peak), default=None))
    if ours:
        both = list(zip(theirs, ours))
        result["ratio"] = spread([mine[0] / peer[0] for peer, mine in both])
        result["cpu_ratio"] = spread([peer[1] / mine[1] if mine[1] else None for peer, mine in both])
        peaks = result["eaglet"]["peak_bytes"], result["peer"]["peak_bytes"]
        result["memory_ratio"] = peaks[0] / peaks[1] if all(peaks) else None
    return result


def note(text):
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


def megabytes(count):
    return "-" if count is None else f"{count / 1e6:,.0f} MB"


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ranged(values, suffix=""):
    if values is None:
        return "-"
    return f"{number(values['median'])}{suffix} ({number(values['min'])}-{number(values['max'])})"


HEADINGS = ["case", "unit", "peers", "eaglet", "faster", "less CPU", "peers' peak", "eaglet's", "of it"]


def table(lines):
    """The comparisons for people: medians, and in brackets the smallest and largest of the rounds."""
    rows = [HEADINGS]
    for line in lines:
        peer, mine = line["peer"], line.get("eaglet")
        share = line.get("memory_ratio")
        rows.append(
            [
                line["name"],
                line["unit"],
                ranged(peer["rate"]),
                ranged(mine["rate"]) if mine else "-",
                ranged(line.get("ratio"), "x"),
                ranged(line.get("cpu_ratio"), "x"),
                megabytes(peer["peak_bytes"]),
                megabytes(mine["peak_bytes"]) if mine else "-",
                "-" if share is None else f"{share:.2f}x",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
