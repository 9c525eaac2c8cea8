"""The family's graphs, their inputs and results, every cut of them."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from support import Case
from torch import Tensor

from gdngen.errors import SpecError
from gdngen.ir import Graph, evaluate, forward_graph
from gdngen.passes.fuse import Cut, Cutter
from gdngen.passes.pipeline import FORMS
from gdngen.passes.plan import Kernel
from gdngen.passes.rewrite import Rewrite
from gdngen.spec import Spec
from gdngen.target import get

TARGET = get("sm_90")
SMALL = {"key_dim": 5, "value_dim": 4}


def family() -> list[Spec]:
    """Every rule, gate, write strength and fused gate together; what is computed from one input alone at least once."""
    found = []
    for rule, gate, beta, fused, more in itertools.product(
        ("delta", "additive"),
        ("none", "scalar", "key", "value", "scalar+key", "key+value", "scalar+key+value"),
        ("none", "head", "value"),
        ("none", "softplus", "bounded"),
        (False, True),
    ):
        options = {"qk_norm": more, "beta_logits": more and beta != "none"}
        try:
            spec = Spec(rule=rule, gate=gate, beta=beta, fused_gate=fused, **options, **SMALL)
        except SpecError:
            continue
        found.append(spec)
    for gate, beta, feature in itertools.product(("none", "scalar"), ("none", "head"), ("identity", "elu1")):
        found.append(Spec(rule="additive", gate=gate, beta=beta, normalize=True, feature_map=feature, **SMALL))
    found.append(Spec(rule="additive", beta="dt", **SMALL))
    found.append(Spec(feature_map="elu1", qk_norm=True, **SMALL))
    found.append(Spec(beta_logits=True, neg_eigval=True, **SMALL))
    return found


def has_chunk_form(spec: Spec) -> bool:
    """All members but one: its inverse would differ per channel."""
    return spec.rule == "additive" or spec.beta != "value"


def graph_data(this: Case) -> dict[str, Tensor]:
    """The inputs of a case as graphs take them: head axes first, value heads as [h, r]."""
    x, H = this.x, this.x["q"].shape[2]
    low, high = this.dt_limit or (0.0, torch.inf)
    scale = 1.0 if this.spec.beta == "dt" else this.spec.key_dim**-0.5
    scalars = {"scale": scale} | ({"dt_min": low, "dt_max": high} if this.spec.beta == "dt" else {})
    data = {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
    for name, value in x.items():
        if name in ("A_log", "dt_bias"):
            data[name] = value.unflatten(0, (H, -1))
        elif name in ("h0", "z0"):
            data[name] = value.unflatten(1, (H, -1))
        else:
            data[name] = value.transpose(1, 2) if name in "qk" else value.transpose(1, 2).unflatten(1, (H, -1))
    return {name: value.double() for name, value in data.items()}


def graph_results(graph: Graph, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What a graph gives, in the layout of ``answer``."""
    o = found["o"].flatten(1, 2).transpose(1, 2)
    return o, *(found[carry.final].flatten(1, 2) for carry in graph.carries)


def cuts_of(spec: Spec) -> list[tuple[Graph, Cut]]:
    """Every legal cut of every form, with its form."""
    found = []
    for rules in FORMS:
        form = forward_graph(spec)
        for rule in rules:
            form = Rewrite(rule).run(form, TARGET)
        found += [(form, cut) for cut in Cutter(form, rules).all()]
    return found


def run_kernels(kernels: Iterable[Kernel], data: Mapping[str, Any], length: int, chunk: int) -> dict[str, Any]:
    """Kernel after kernel in float64; each sees the inputs and what earlier ones stored."""
    known = dict(data)
    for kernel in kernels:
        known |= evaluate(kernel.graph, known, length, chunk, per_chunk=kernel.stores)
    return known
