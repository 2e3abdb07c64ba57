"""Where the time of one exact step goes (temporary)."""

import sys, time, torch, functools
from benchmarks.scale import *
import pullback.optim.natural_gradient, pullback.optim.problem as P, pullback.maps.module as M, pullback.maps.layers.affine as AF, pullback.maps.layers.base as B

NG = sys.modules["pullback.optim.natural_gradient"]
A = sys.modules["pullback.grams.assemble"]
from pullback.solvers import Cholesky

T = {}
cuda = torch.cuda.is_available()
dev = torch.device("cuda" if cuda else "cpu")
sync = torch.cuda.synchronize if cuda else (lambda: None)


def timed(owner, name, label=None):
    f = getattr(owner, name)

    @functools.wraps(f)
    def g(*a, **k):
        sync()
        t = time.perf_counter()
        out = f(*a, **k)
        sync()
        key = label(*a) if label else name
        T[key] = T.get(key, 0) + 1e3 * (time.perf_counter() - t)
        return out

    setattr(owner, name, g)
    return (owner, name, f)


t0 = time.time()


def log(*a):
    print(f"[{time.time() - t0:6.1f}]", *a, flush=True)


for spec in sys.argv[1:]:
    name, _, n = spec.partition(":")
    torch.manual_seed(0)
    make, shape = PROBLEMS[name]
    if n:
        PROBLEMS[name] = (make, (int(n), *shape[1:]))
    model, x, y = build(name, dev)
    run = natural(model, x, y)
    base = sgd(model, x, y)
    for _ in range(2):
        base()
        info = run()
        sync()
        log("ran")
    log(spec, info.gram, "whitened", info.whitened)
    t = compare({"sgd": base, "ng": run}, dev, repeats=5, warmup=1)
    log(t, "ratio", t["ng"] / t["sgd"])
    saved = [
        timed(P.ClosureProblem, "evaluate"),
        timed(M.ModuleMap, "linearize"),
        timed(M.ModuleLinearization, "pullback"),
        timed(A, "_kernel"),
        timed(NG, "confirmed"),
        timed(Cholesky, "init"),
        timed(Cholesky, "solve"),
        timed(NG.NaturalGradient, "_apply"),
        timed(AF.AffineBlock, "lift"),
        timed(B.Block, "gram", lambda *a: "rows gram"),
        timed(AF.AffineBlock, "gram", lambda s, o, b: f"gram {s.shape} {s.route}"),
    ]
    T.clear()
    run()
    for k, v in sorted(T.items(), key=lambda kv: -kv[1])[:16]:
        log(f"{v:9.2f}", k)
    for o, nm, f in reversed(saved):
        setattr(o, nm, f)
    if "mlp" in name:
        log(
            "memory GiB",
            peak_bytes(base, dev) / 2**30,
            peak_bytes(run, dev) / 2**30,
            "error",
            relative_error(model, x, y),
        )
    del model, run, base
    if cuda:
        torch.cuda.empty_cache()
