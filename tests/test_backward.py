"""The derivatives beside the ops: the derived gradient graph against autograd of the float64 recurrence."""

import pytest
import torch

from gdngen import oracle
from gdngen.ir import evaluate, forward_graph, parse, verify
from gdngen.passes.backward import Backward
from gdngen.passes.rewrite import FoldToTokens
from gdngen.spec import Spec
from gdngen.target import get

B, T, H, R, K, V = 2, 13, 2, 3, 5, 4
GATES = {"scalar": ("g", ()), "key": ("gk", (K,)), "value": ("gv", (V,))}
MEMBERS = (
    Spec(),
    Spec(gate="none"),
    Spec(gate="key", qk_norm=True),
    Spec(gate="value"),
    Spec(gate="scalar+key"),
    Spec(beta="none"),
    Spec(rule="additive"),
    Spec(rule="additive", gate="value", beta="none"),
    Spec(rule="additive", gate="none", normalize=True, feature_map="elu1"),
    Spec(fused_gate="softplus", qk_norm=True, beta_logits=True, neg_eigval=True),
    Spec(gate="key", fused_gate="bounded", beta_logits=True),
)


def inputs(spec: Spec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    x = {"q": normal(B, T, H, K), "k": 0.5 * normal(B, T, H, K), "v": normal(B, T, H * R, V)}
    x |= {"h0": normal(B, H * R, K, V)}
    if spec.normalize:
        x |= {"z0": normal(B, H * R, K).abs()}
    for gate in spec.gate:
        name, own = GATES[gate]
        if spec.fused_gate == "none":
            x[name] = -normal(B, T, H * R, *own).abs()
            x[name][:, 5], x[name][:, 6] = -torch.inf, -20.0
        else:
            x |= {"a": normal(B, T, H * R, *own), "A_log": 0.3 * normal(H * R), "dt_bias": normal(H * R, *own)}
    if spec.beta == "head":
        x["b" if spec.beta_logits else "beta"] = normal(B, T, H * R).sigmoid()
    return {name: value.requires_grad_() for name, value in x.items()}


def reference(spec: Spec, x: dict[str, torch.Tensor]):
    q, k = (torch.nn.functional.elu(x[n]) + 1 if spec.feature_map == "elu1" else x[n] for n in ("q", "k"))
    if spec.qk_norm:
        q, k = oracle.normalized(q), oracle.normalized(k)
    gates = {name: x.get(name) for name in ("g", "gk", "gv")}
    if spec.fused_gate != "none":
        gates[GATES[spec.gate[0]][0]] = oracle.gate(x["a"], x["A_log"], x["dt_bias"], spec.lower_bound)
    beta = x["b"].sigmoid() * (2 if spec.neg_eigval else 1) if spec.beta_logits else x.get("beta")
    more = {"rule": spec.rule, "normalize": spec.normalize, "h0": x["h0"], "z0": x.get("z0"), "scale": 0.3}
    return oracle.recurrence(q, k, x["v"], **gates, beta=beta, **more)


def as_graph(name: str, value: torch.Tensor) -> torch.Tensor:
    """The graph's dimension order: heads before tokens, value heads as [h, r]."""
    if name in ("q", "k"):
        return value.transpose(1, 2)
    if name in ("A_log", "dt_bias"):
        return value.unflatten(0, (H, R))
    return value.unflatten(1, (H, R)) if name in ("h0", "z0") else value.transpose(1, 2).unflatten(1, (H, R))


@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("spec", MEMBERS, ids=lambda spec: spec.name)
def test_every_gradient(spec: Spec, chunk: int) -> None:
    x = inputs(spec)
    o, state = reference(spec, x)
    state, z = state if spec.normalize else (state, None)
    cotangents = [torch.randn_like(t) for t in (o, state, z) if t is not None]
    loss = sum((t * c).sum() for t, c in zip((o, state, z), cotangents, strict=False))
    wanted = dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True))
    forward = forward_graph(spec)
    if chunk == 1:
        forward = FoldToTokens().run(forward, get("sm_90"))
    data = {name: as_graph(name, value.detach()) for name, value in x.items()}
    data["scale"] = torch.tensor(0.3, dtype=torch.float64)
    run = evaluate(forward, data, T, chunk)
    graph = verify(Backward().run(forward, get("sm_90")))
    assert parse(str(graph)) == graph
    data |= {"do": as_graph("v", cotangents[0]), "dht": as_graph("h0", cotangents[1]), "S": run["S@chunks"]}
    if spec.normalize:
        data |= {"dzt": as_graph("z0", cotangents[2]), "z": run["z@chunks"]}
    found = evaluate(graph, data, T, chunk)
    for name, gradient in wanted.items():
        expected = as_graph(name, gradient)
        assert torch.isfinite(expected).all()
        assert oracle.rms_ratio(found[f"d{name}"].expand_as(expected), expected) < 1e-10, name


def test_the_inverse_is_differentiated_as_a_solve() -> None:
    """Neither dX nor X^T dX X^T exists: 19 products in all, two of them with X."""
    graph = Backward().run(forward_graph(Spec()), get("sm_90"))
    products = [i for i in range(len(graph.nodes)) if graph.kind(i) in ("dot", "decayed")]
    inverse = next(i for i, node in enumerate(graph.nodes) if node.op == "uli")
    assert len(products) == 19
    assert sum(any(ref.value == inverse for ref in graph.nodes[i].args) for i in products) == 2
