"""Figures of the documents' mla text, of the records in tests/benchmarks/results (or a folder given)."""
import json, sys
from pathlib import Path
R = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/benchmarks/results")
def rec(n): return json.loads((R / f"fidelity-mla-{n}.json").read_text())
M, D, O, C, G = (rec(n) for n in ("500-cpu2", "drift-500-cpu2", "orders-250-cpu2", "composition-250-cpu2", "growth-500-cpu2"))
t = {k.removeprefix("mla: "): v for r in (M, D, O, C, G) for k, v in r["tables"].items()}
S = ["single", "multi", "legend", "frames", "chain", "tally", "retrieval", "control"]
def row(name, arm, cols=S): return " ".join(f"{c} {t[name][arm].get(c, float('nan')):.3f}" for c in cols)
print("== accuracy")
for a in ("exact", "blind", "patch_8", "patch_16", "orbit", "composed", "mpic_32", "cacheblend_15"): print(a, row("accuracy", a))
e = t["accuracy"]["exact"]; print("pooled multi frames tally", (e["multi"]+e["frames"]+e["tally"])/3, "with legend", (e["multi"]+e["frames"]+e["tally"]+e["legend"])/4)
print("== eta")
for a in ("patch_8", "patch_16", "orbit", "deep", "shared", "asked_15"):
    if a in t["eta"]: print(a, row("eta", a))
print([a for a in t["eta"]])
print("flips", {a: round(t["flip_recover"][a]["multi"], 3) for a in ("patch_8", "patch_16", "patch_32") if a in t["flip_recover"]})
print("bytes", {a: round(t["bytes_fraction"][a]["multi"], 3) for a in ("patch_8", "patch_16", "orbit", "composed")})
print("orbit below own", {s: round(t["eta"]["patch_16"][s] - t["eta"]["orbit"][s], 3) for s in S})
print("== margin (patch over tokens at equal bytes)")
for b, cells in t["eta of the patch over tokens at equal bytes"].items(): print(b, {k: round(v, 3) for k, v in cells.items() if "±" not in k and "uncertainty" not in k})
print("== eta at equal bytes, multi/frames/tally")
for a, c in t["eta at equal bytes"].items(): print(a, {s: round(c[s], 3) for s in ("multi", "frames", "tally", "legend")})
print("== composition")
for k in t:
    if k.startswith("accuracy by composition"):
        print(k)
        for b, cells in t[k].items(): print("  ", b, {a: round(v, 3) for a, v in cells.items() if "95" not in a and "±" not in a})
print("== figures", {k: v for k, v in C["figures"].items() if "compose" in k})
print("== by order")
for k in ("η by order", "accuracy by order"): 
    for b, c in t[k].items(): print(k, b, {a: round(v, 3) for a, v in c.items() if "95" not in a and "±" not in a})
print("== drift rule", t["rule"])
print("== answers changed", {s: {a: round(v, 3) for a, v in c.items() if "95" not in a and "±" not in a} for s, c in t["answers changed by drift"].items()})
print("== rolling KL", {s: round(c["mean"], 3) for s, c in t["rolling KL by situation"].items()}, list(next(iter(t["rolling KL by situation"].values()))))
for s, c in t["rolling KL by situation"].items(): print("   ", s, {k: round(v, 3) for k, v in c.items()})
print("== growth")
for k in ("accuracy by pages", "median TTFT by pages, ms"):
    for a, c in t[k].items(): print(k, a, {n: round(v, 3) for n, v in c.items() if "95" not in n and "±" not in n})
print("== storage")
for a, c in t["equal bytes"].items(): print(a, {k: round(v, 4) for k, v in c.items() if "95" not in k and "±" not in k})
print("== by layers")
for a, c in t["eta by layers computed"].items(): print(a, {k: round(v, 3) for k, v in c.items() if "95" not in k and "±" not in k})
print("== other tables", [k for k in t])
for k in t:
    if any(w in k for w in ("diffus", "token", "spread", "energy", "rank", "depth")) and "equal" not in k:
        print(k)
        for a, c in t[k].items(): print("   ", a, {x: round(v, 3) for x, v in c.items() if "±" not in x and "95" not in x})
