"""Random sizes of random members on a GPU against the float64 recurrence: results, every gradient, the same bits twice.

Key dims 1 to 256 and value dims 1 to 300 with odd ones, chunk lengths, dtypes, head ratios, layouts, packed sequences
with empty ones, views, fused inputs, subsets of gradients.  Each configuration builds and compiles a package and makes
four calls of other lengths, offsets and gates, in a process of its own, which may crash alone.  A failure is one line
that can be pasted back as a command.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

DTYPES = ("float32", "float16", "bfloat16")
OPERANDS = ("q", "k", "v", "h0", "z0")  # of products, in the inputs' dtype
DRAWS = 32  # of roundings, where a budget was missed
HARD = 1.5  # times the budget: what hard inputs may miss
CANCELLED = 1e-7  # of what arrives for o: errors of gradients that float32 leaves where terms are opposite
LIMIT = 240  # seconds for one configuration
DEVICE = "cuda"
Config = dict[str, Any]


class Result(NamedTuple):
    """status: ok, faint, hard, wrong, bits (others in a second call), refused (ArgumentError), resources, crash, slow.

    faint: over the budget, by no more than rounding the operands to their dtype once changes the float64 result, or
    than float32 leaves of terms that cancel: a handful of numbers.  hard: over the budget by less than half, without
    decay and with write strengths up to 2, where the contract (section 5, hard inputs) compares with fla-core instead.
    """

    status: str
    note: str
    errors: dict[str, float]
    seconds: float


# ------------------------------------------------------------------------------------------------ configurations


def draw(rng: random.Random) -> Config:
    """A Spec's options, what kernels are compiled for, and several calls of those kernels."""
    spec = _member(rng)
    spec |= {"key_dim": _size(rng, 256), "value_dim": _size(rng, 300)}
    spec["chunk"] = rng.choices((16, 32, 64, 128), (3, 4, 9, 4))[0]
    if spec.get("beta") != "dt":
        spec |= {"state_v_first": rng.random() < 0.4, "qk_norm": rng.random() < 0.5}
    H, R = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3, 4))
    packed = rng.random() < 0.5
    return {
        "spec": {name: value for name, value in spec.items() if value is not False},
        "dtype": rng.choices(DTYPES, (7, 4, 9))[0],
        "heads": (H, H * R),
        "strided": rng.random() < 0.3,
        "stateful": rng.random() < 0.7,
        "invariant": rng.random() < 0.7,  # one launch choice for every number of heads, whole sequences
        "needs": rng.choice(("all", "all", "all", "some")),
        "seed": rng.randrange(1000),
        "calls": [_call(rng, packed, first=n == 0) for n in range(4)],
    }


def _call(rng: random.Random, packed: bool, first: bool) -> Config:
    gates = rng.choice(("mild", "mild", "weak", "strong", "mixed", "zero"))
    call: Config = {"gates": gates, "through": "chunk" if first else rng.choice(("chunk", "chunk", "recurrent"))}
    if packed:
        ends = sorted(rng.choices(range(0, 180), k=rng.randint(1, 4)))
        return call | {"offsets": (0, *ends, ends[-1]), "tokens": max(1, ends[-1]) + rng.choice((0, 1, 40))}
    return call | {"tokens": rng.choice((1, 2, 15, 33, 64, 75, 128, 150, 200)), "sequences": rng.choice((1, 1, 2, 3))}


def _member(rng: random.Random) -> Config:
    gates = ("scalar", "key", "value", "none", "scalar+key", "scalar+value", "key+value", "scalar+key+value")
    gate = rng.choices(gates, (40, 15, 12, 18, 4, 4, 4, 3))[0]
    spec: Config = {"gate": gate, "rule": rng.choices(("delta", "additive"), (7, 3))[0]}
    if spec["rule"] == "additive":
        if gate == "scalar" and rng.random() < 0.3:
            return spec | {"beta": "dt"}
        if gate in ("scalar", "none") and rng.random() < 0.3:
            spec |= {"normalize": True, "feature_map": rng.choice(("identity", "elu1"))}
    spec["beta"] = rng.choices(("head", "none", "value"), (16, 3, 1))[0]
    if spec["beta"] == "head" and rng.random() < 0.25:
        spec |= {"beta_logits": True, "neg_eigval": rng.random() < 0.5}
    if "+" not in gate and gate != "none" and rng.random() < 0.25:
        spec["fused_gate"] = rng.choice(("softplus", "bounded"))
    return spec


def _size(rng: random.Random, most: int) -> int:
    """Small ones, any, tile widths and their neighbours."""
    width = rng.choice((8, 16, 32, 64, 128, 256))
    return rng.choice((rng.randint(1, 32), rng.randint(17, 128), rng.randint(1, most), width, min(most, width + 1)))


def parsed(text: str) -> Config:
    return dict(json.loads(text))


# ------------------------------------------------------------------------------------------------ one configuration


def inputs(config: Config, spec: Any, call: Config) -> tuple[dict[str, Any], Any]:
    """What the Spec reads, and the call as a case of gdngen.calls."""
    from gdngen import calls

    case = calls.Case(
        f"check_sizes {config['seed']}",
        call["tokens"],
        call.get("sequences", 1),
        tuple(call.get("offsets", ())),
        strided=config["strided"],
        stateful=config["stateful"],
    )
    x = calls.inputs(spec, case, getattr(torch, config["dtype"]), tuple(config["heads"]), DEVICE)
    for gate in (x[name] for name in ("g", "gk", "gv") if name in x):
        if call["gates"] == "weak":
            gate *= 0.03
        elif call["gates"] == "strong":
            gate *= 60
        elif call["gates"] == "zero":
            gate.zero_()
        elif call["gates"] == "mixed":
            for place, value in enumerate((-20.0, 0.0, -torch.inf, -1e4)):
                gate[:, 2 + place :: 7] = value
    return x, case


def check(config: Config) -> Result:
    """Build the package and make every call: forward twice, gradients twice, the other operator."""
    begun, found = time.monotonic(), []
    os.environ["GDNGEN_BATCH_INVARIANT"] = str(int(config.get("invariant", False)))
    import gdngen
    from gdngen import api

    spec = gdngen.Spec(**config["spec"])
    with tempfile.TemporaryDirectory() as folder:
        path = api.build(spec, folder)
        package = api.import_folder(path, path.name)
        for call in config["calls"]:
            found.append(_checked(package, spec, config, call))
    errors = {f"{n} {name}": error for n, one in enumerate(found) for name, error in one.errors.items()}
    worst = next(
        (one for status in ("wrong", "bits", "hard", "faint") for one in found if one.status == status), found[0]
    )
    notes = "; ".join(f"call {n}: {one.note or one.status}" for n, one in enumerate(found) if one.status != "ok")
    return Result(worst.status, notes, errors, time.monotonic() - begun)


def _checked(package: Any, spec: Any, config: Config, call: Config) -> Result:
    from gdngen import calls
    from gdngen.autotune.gate import cotangents_of

    chunked = spec.beta != "value" or spec.rule == "additive"
    form = call["through"] if chunked else "recurrent"
    x, case = inputs(config, spec, call)
    rng = random.Random(config["seed"])
    names = [name for name, value in x.items() if value.is_floating_point()]
    if config["needs"] == "some":
        names = sorted(rng.sample(names, rng.randint(1, len(names))))
    for name in names if chunked else ():
        x[name] = x[name].detach().requires_grad_()
    leaves = [value for value in x.values() if value.requires_grad]
    exact = {name: value.detach().double() if value.is_floating_point() else value for name, value in x.items()}
    exact |= {name: exact[name].requires_grad_(value.requires_grad) for name, value in x.items()}

    def called(by: str) -> list[torch.Tensor]:
        operator = getattr(package, calls.operator_name(spec, by))
        o, state = operator(**calls.keywords(spec, by, x, case))
        return [o, *(state if spec.normalize else (state,))]

    found = []
    for _ in range(2):
        results = called(form)
        given = cotangents_of(results, x["v"].dtype)
        found.append(results + _gradients(results, leaves, given))
    labels = ["o", "state", "z"][: len(given)] + [f"d{name}" for name, value in x.items() if value.requires_grad]
    if chunked:
        other = "recurrent" if form == "chunk" else "chunk"
        with torch.no_grad():
            found[0] += called(other)
            found[1] += found[0][len(found[1]) :]
        labels += [f"{other} {name}" for name in labels[: len(given)]]
    return _judged(config["dtype"], labels, found, Exact(spec, case, chunked), exact, given)


class Exact(NamedTuple):
    """The call in float64: results, gradients, and once more the results as the other operator's."""

    spec: Any
    case: Any
    chunked: bool

    @property
    def is_hard(self) -> bool:
        return self.spec.rule == "delta" and self.spec.neg_eigval and not self.spec.gate

    def everything(self, x: dict[str, Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
        from gdngen import calls

        right = calls.expected(self.spec, x, self.case)
        gradients = _gradients(right, [y for y in x.values() if y.requires_grad], [d.double() for d in given])
        return [*right, *gradients, *(right if self.chunked else ())]

    def rounded(self, x: dict[str, Any], given: list[torch.Tensor], dtype: str, seed: int) -> list[torch.Tensor]:
        """Everything, of operands and cotangents that were rounded to ``dtype`` once more."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        half_ulp = torch.finfo(getattr(torch, dtype)).eps / 2

        def near(y: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(y.shape, generator=generator, device=DEVICE, dtype=torch.float64)
            return y.detach().double() * (1 + half_ulp * (2 * noise - 1))

        moved = {name: near(y).requires_grad_(y.requires_grad) if name in OPERANDS else y for name, y in x.items()}
        return self.everything(moved, [near(d) for d in given])


def _gradients(results: Any, leaves: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    pairs = [(y, d) for y, d in zip(results, given) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in leaves]
    results, given = (list(column) for column in zip(*pairs))
    found = torch.autograd.grad(results, leaves, given, allow_unused=True)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found)]


def _judged(dtype: str, labels: list[str], found: list[Any], exact: Exact, x: Any, given: list[Any]) -> Result:
    from gdngen.oracle import budget, rms_ratio

    wanted = exact.everything(x, given)
    errors = {name: rms_ratio(a, b) for name, a, b in zip(labels, found[0], wanted, strict=True)}
    over = {name: error for name, error in errors.items() if not error <= budget(name.split()[-1], dtype)}
    note, status = ", ".join(f"{name} {error:.1e}" for name, error in over.items()), "ok"
    if over:
        draws = [exact.rounded(x, given, dtype, seed) for seed in range(DRAWS)]
        noise = {n: max(map(rms_ratio, moved, [y] * DRAWS)) for n, y, *moved in zip(labels, wanted, *draws)}
        least = CANCELLED * _rms(given[0])
        noise |= {n: max(noise[n], least / max(_rms(y), 1e-30)) for n, y in zip(labels, wanted) if n[0] == "d"}
        if exact.spec.qk_norm and exact.spec.key_dim == 1:  # what the norm's epsilon leaves, a millionth of its terms
            noise |= {"dq": math.inf, "dk": math.inf}
        status = "faint" if all(error <= noise[name] for name, error in over.items()) else "wrong"
        if (
            status == "wrong"
            and exact.is_hard
            and all(e <= HARD * budget(n.split()[-1], dtype) for n, e in over.items())
        ):
            status = "hard"
        note += " where rounding the operands gives " + ", ".join(f"{name} {noise[name]:.1e}" for name in over)
    other = [name for name, a, b in zip(labels, *found) if not torch.equal(_bits(a), _bits(b))]
    if other:
        status, note = status if status == "wrong" else "bits", f"{note} other bits: {', '.join(other)}".strip()
    return Result(status, note, errors, 0.0)


def _rms(x: torch.Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


# ------------------------------------------------------------------------------------------------ processes


def _child(config: Config, answer: Connection) -> None:
    from gdngen.errors import GdngenError

    begun = time.monotonic()
    try:
        result = check(config)
    except Exception as error:
        kind, text = type(error).__name__, " ".join(str(error).split())
        lacks = "OutOfResources" in kind or "out of resource" in text or "does not fit" in text
        refused = isinstance(error, GdngenError) or kind == "ArgumentError"
        status = "refused" if refused else "resources" if lacks else "crash"
        result = Result(status, f"{kind}: {text[:300]}", {}, time.monotonic() - begun)
    answer.send(result)
    answer.close()


def run(configs: list[Config], workers: int, until: float) -> Iterator[tuple[Config, Result]]:
    """Results as they come; a process that dies or takes too long is a result of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "triton", "gdngen.api", "gdngen.calls"])
    waiting, live = list(reversed(configs)), {}
    while waiting or live:
        while waiting and len(live) < workers and time.monotonic() < until:
            config = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(config, theirs), daemon=True)
            process.start()
            theirs.close()
            live[ours] = (config, process, time.monotonic())
        if not live:
            return
        for ours in wait(list(live), timeout=1.0):
            config, process, begun = live.pop(ours)
            try:
                result = ours.recv()
            except EOFError:
                process.join()
                result = Result("crash", f"the process ended with {process.exitcode}", {}, time.monotonic() - begun)
            process.join()
            yield config, result
        for ours, (config, process, begun) in list(live.items()):
            if time.monotonic() - begun > LIMIT:
                process.kill()
                del live[ours]
                yield config, Result("slow", f"not done after {LIMIT} s", {}, LIMIT)


def command(config: Config) -> str:
    return f"python benchmarks/check_sizes.py --config {shlex.quote(json.dumps(config))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="configurations (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; each has its own")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--seconds", type=float, default=3600, help="start none after this time")
    parser.add_argument("--config", type=parsed, action="append", help="this one instead, as a failure prints it")
    parser.add_argument("--file", type=Path, help="these ones instead, a JSON list")
    parser.add_argument("--only", default="", help="only configurations whose JSON matches this expression")
    parser.add_argument("--json", type=Path, help="write every result there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("check_sizes: needs a GPU, and torch sees none", file=sys.stderr)
        return 3
    configs = options.config or (json.loads(options.file.read_text()) if options.file else None)
    if configs is None:
        configs = [draw(random.Random(options.seed + n)) for n in range(options.count)]
    configs = [config for config in configs if re.search(options.only, json.dumps(config))]
    begun, records, counts = time.monotonic(), [], Counter()
    for config, result in run(configs, options.workers, begun + options.seconds):
        counts[result.status] += 1
        records.append({"config": config, **result._asdict()})
        if result.status != "ok":
            print(f"{result.status}: {result.note}\n    {command(config)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(records))
    seconds, done = time.monotonic() - begun, ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    calls = sum(len(record["config"]["calls"]) for record in records)
    where = f"{torch.cuda.get_device_name()}: {len(records)} of {len(configs)} configurations, {calls} calls"
    print(f"{where} in {seconds:.0f} s: {done}")
    return int(any(status not in ("ok", "faint", "hard", "refused") for status in counts))


if __name__ == "__main__":
    sys.exit(main())
