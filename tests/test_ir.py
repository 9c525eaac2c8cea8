"""The IR: text, verifier, op table, evaluator, builder, the family's graphs against the oracle, rewrites."""

import networkx as nx
import pytest
import torch
from graphs import family, graph_data, graph_results, has_chunk_form
from hypothesis import given, settings
from hypothesis import strategies as st
from support import answer, case, errors

from gdngen.errors import GraphError, SpecError
from gdngen.ir import Builder, Carry, Graph, Node, Ref, evaluate, forward_graph, parse, verify
from gdngen.ir.builder import rebuild
from gdngen.ir.graph import GRID, TOKENS
from gdngen.ir.offsets import OFFSETS
from gdngen.ir.ops import OPS
from gdngen.passes.rewrite import RULES, FoldToTokens, Rewrite
from gdngen.spec import Spec
from gdngen.target import get

TARGET = get("sm_90")
EXACT = 1e-12  # float64, tiny sizes
FAMILY = family()
NAMES = [spec.name for spec in FAMILY]


@st.composite
def specs(draw) -> Spec:
    """Any Spec whatsoever."""
    fields = {
        "rule": st.sampled_from(["delta", "additive"]),
        "gate": st.sampled_from(["none", "scalar", "key", "value", "scalar+key", "scalar+value", "scalar+key+value"]),
        "beta": st.sampled_from(["none", "head", "value", "dt"]),
        "fused_gate": st.sampled_from(["none", "softplus", "bounded"]),
        "feature_map": st.sampled_from(["identity", "elu1"]),
        "key_dim": st.integers(1, 256),
        "value_dim": st.integers(1, 300),
        "chunk": st.sampled_from([16, 32, 64, 128, "auto"]),
    }
    for flag in ("beta_logits", "neg_eigval", "qk_norm", "normalize", "state_v_first"):
        fields[flag] = st.booleans()
    chosen = {name: draw(strategy) for name, strategy in fields.items()}
    try:
        return Spec(**chosen)
    except SpecError:  # leave out what contradicts itself most often
        plain = {"fused_gate": "none", "beta_logits": False, "neg_eigval": False, "normalize": False}
        beta = "none" if chosen["beta"] == "dt" else chosen["beta"]
        return Spec(**chosen | plain | {"beta": beta})


def forms(spec: Spec) -> list[Graph]:
    """The graph, every rewrite of it, and the same at chunk length 1."""
    graph = forward_graph(spec)
    folded = FoldToTokens().run(graph, TARGET)
    rewritten = [Rewrite(rule).run(graph, TARGET) for rule in RULES]
    return [graph, *rewritten, folded, Rewrite("read_after_write").run(folded, TARGET)]


# ---- text and identity -----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(spec=specs())
def test_text_round_trip(spec):
    for graph in forms(spec):
        again = parse(str(graph))
        assert again == graph and str(again) == str(graph) and again.names == graph.names
        assert again.digest == graph.digest


@settings(max_examples=30)
@given(spec=specs(), data=st.data())
def test_the_digest_ignores_hints_and_nothing_else(spec, data):
    graph = forward_graph(spec)
    other = Graph(graph.nodes, graph.outputs, graph.carries, graph.chunked, ("",) * len(graph.nodes))
    assert str(other) != str(graph) and other.digest == graph.digest and other == graph
    scaled = [i for i, node in enumerate(graph.nodes) if node.op in ("ein", "add")]
    i = data.draw(st.sampled_from(scaled))
    node = graph.nodes[i]
    changed = Node(node.op, node.args, (float(node.attrs[0]) + 0.5, *node.attrs[1:]), node.axes, node.grid)
    nodes = (*graph.nodes[:i], changed, *graph.nodes[i + 1 :])
    assert Graph(nodes, graph.outputs, graph.carries, graph.chunked, graph.names).digest != graph.digest


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("chunk C\na[i] @bnhr = exp(b[i])", "line 2: cannot read 'a[i] @bnhr = exp(b[i])' (unknown value 'b[i]')"),
        ("a[i @bnhr = input", "expected: NAME[AXES] @GRID = ..."),
        ("a[i,x] @bnhr = input", "unknown axis"),
        ("a[i] @bnz = input", "line 1"),
        ("a[i] @bnhr input", "line 1"),
        ("S[k] @bnhr = carry_in\ncarry S <- S[k] final -> ht", "line 2: cannot read"),
        ("a[i] @bnhr = input\noutput o = c[i]", "unknown value 'c[i]'"),
    ],
)
def test_unreadable_text_names_the_line(text, fragment):
    with pytest.raises(GraphError) as error:
        parse(text)
    assert fragment in str(error.value)


# ---- the verifier ----------------------------------------------------------------------------------------------------

LEAVES = "a[i] @bnhr = input\nm[i,j] @bnhr = input\nx[i,k] @bnh = input\ns[k,v] @bhr = input\nS[k,v] @bnhr = carry_in\n"
CARRY = "carry S <- S[k,v] init s[k,v] final -> ht\n"

BROKEN = [
    ("y[i] @bnhr = frobnicate(a[i])", "value y: unknown op 'frobnicate'; ops are input,"),
    ("y[i] @bnh = exp(a[i])", "value y: declared 'i' @'bnh', its operands give ('i', 'bnhr')"),
    ("y[j] @bnhr = exp(a[i])", "value y: declared 'j'"),
    ("y[i,v] @bnhr = sum k: x[i,k] * S[k,v]\nz[i] @bnhr = y[i,v] + a[i]", "value z: declared 'i'"),
    ("y[k,i] @bnh = exp(x[i,k])", "value y: axes 'ki' @'bnh' are not in standard order"),
    ("y[i] @hnbr = exp(a[i])", "are not in standard order"),
    ("y[i] @bnhr = exp(m[i])", "value y: operand read under 'i', but the value has axes 'ij'"),
    ("y[i] @bnhr = exp(m[i,i])", "value y: operand read under 'ii', but the value has axes 'ij'"),
    ("y[i,j] @bnhr = decay.ij(a[j])", "value y: decay: its gate must be read under token axis i, got axes 'j'"),
    ("y[i,j] @bnhr = uli(a[i])", "value y: uli: the matrix has axes 'i', expected 'ij'"),
    ("y[i,k] @bnhr = uli(x[i,k])", "expected 'ij'"),
    (
        "v[i,v] @bnhr = input\nw[i,j,v] @bnhr = m[i,j] * v[i,v]\ny[i,j,v] @bnhr = uli(w[i,j,v])",
        "value y: its matrix has axes 'ijv': a write strength per value channel under the delta rule has no chunk form",
    ),
    (
        "d[i,j,k] @bnh = decay.ij(x[i,k])\ny[i,j,k] @bnh = exp(d[i,j,k])",
        "value y: axes 'ijk': two token axes and a channel",
    ),
    ("w[i] @bnhr = input\nq[i] @bnhr = input\na[i] @bnhr = input", "declared twice: a"),
    ("output o = S[k,k]", "operand read under 'kk'"),
]


@pytest.mark.parametrize(("lines", "fragment"), BROKEN, ids=[fragment for _, fragment in BROKEN])
def test_the_verifier_rejects(lines, fragment):
    with pytest.raises(GraphError) as error:
        verify(parse(LEAVES + lines + "\n" + CARRY))
    assert fragment in str(error.value)
    verify(parse(LEAVES + CARRY))  # the rest of the text is sound


def test_the_verifier_rejects_token_axes_at_chunk_length_1():
    with pytest.raises(GraphError, match="value a: axes 'i' hold a token axis, but the chunk length is 1"):
        verify(parse("chunk 1\n" + LEAVES + CARRY))


def test_the_verifier_rejects_what_text_cannot_say():
    sound = parse(LEAVES + CARRY)
    late = Node("exp", (Ref(6, "i"),), (), "i", "bnhr")
    forward = Graph((*sound.nodes, late, sound.nodes[0]), (), sound.carries)
    with pytest.raises(GraphError, match="operand 6 is not defined before its use"):
        verify(forward)
    with pytest.raises(GraphError, match="is not defined before its use"):
        verify(Graph(sound.nodes, (("o", Ref(99, "")),), sound.carries))
    carry = sound.carries[0]
    with pytest.raises(GraphError, match="carry z is never read"):
        verify(Graph(sound.nodes, (), (Carry("z", carry.out, carry.init, "zt"),)))
    with pytest.raises(GraphError, match="carry S: out has axes 'ij', the carried value 'kv'"):
        verify(Graph(sound.nodes, (), (Carry("S", Ref(1, "ij"), carry.init, "ht"),)))
    with pytest.raises(GraphError, match="carry S: init has axes 'i', the carried value 'kv'"):
        verify(Graph(sound.nodes, (), (Carry("S", carry.out, Ref(0, "i"), "ht"),)))


# ---- the op table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_op_is_declared_whole(op):
    assert OPS[op.name] is op and op.doc.endswith(".") and op.flops_per_element >= 0
    if op.name not in ("input", "carry_in"):
        assert op.infer is not None and op.evaluate is not None
    without_derivative = ("input", "carry_in", "const", "tri", "elu1_slope", "crossing", "within")
    without_derivative += ("odds", "share", "rest", "lead", "first", "placed", "passed")
    assert op.derive is not None or op.name in without_derivative


def test_every_op_is_used_by_the_family_or_by_backward():
    used = {node.op for spec in FAMILY for graph in forms(spec) for node in graph.nodes}
    assert set(OPS) - used == {"crossing", "cumsum", "elu1_slope", "odds", "share", "rest", "within", *OFFSETS}
    assert used - set(OPS) == set()


# ---- the graphs of the family ----------------------------------------------------------------------------------------

FORWARD = """\
chunk C
q[i,k] @bnh      = input
k[i,k] @bnh      = input
v[i,v] @bnhr     = input
g[i] @bnhr       = input
E[i,j] @bnhr     = decay.ij(g[i])
eG[i] @bnhr      = decay.i0(g[i])
eT[i] @bnhr      = decay.1i(g[i])
eL[] @bnhr       = decay.10(g[i])
beta[i] @bnhr    = input
S[k,v] @bnhr     = carry_in
t10[i,v] @bnhr   = sum k: k[i,k] * S[k,v]
KS[i,v] @bnhr    = eG[i] * t10[i,v]
t12[i,j] @bnh    = sum k: k[i,k] * k[j,k]
A[i,j] @bnhr     = E[i,j] * beta[i] * t12[i,j]
X[i,j] @bnhr     = uli(A[i,j])
e[i,v] @bnhr     = v[i,v] + -KS[i,v]
y[i,v] @bnhr     = beta[i] * e[i,v]
r[i,v] @bnhr     = sum j: X[i,j] * y[j,v]
t18[k,v] @bnhr   = eL * S[k,v]
t19[i,v] @bnhr   = eT[i] * r[i,v]
KR[k,v] @bnhr    = sum i: k[i,k] * t19[i,v]
S_out[k,v] @bnhr = t18[k,v] + KR[k,v]
h0[k,v] @bhr     = input
t23[i,j] @bnh    = sum k: q[i,k] * k[j,k]
P[i,j] @bnhr     = E[i,j] * t23[i,j]
PR[i,v] @bnhr    = sum j: r[j,v] * P[i,j]
t26[i,v] @bnhr   = sum k: q[i,k] * S[k,v]
QS[i,v] @bnhr    = eG[i] * t26[i,v]
t28[i,v] @bnhr   = PR[i,v] + QS[i,v]
scale[] @        = input
o[i,v] @bnhr     = t28[i,v] * scale
carry S <- S_out[k,v]   init h0[k,v]   final -> ht
output o = o[i,v]
"""

DECODE = """\
chunk 1
q[k] @bnh        = input
k[k] @bnh        = input
v[v] @bnhr       = input
g[] @bnhr        = input
eG[] @bnhr       = exp(g)
beta[] @bnhr     = input
S[k,v] @bnhr     = carry_in
t7[v] @bnhr      = sum k: k[k] * S[k,v]
KS[v] @bnhr      = eG * t7[v]
e[v] @bnhr       = v[v] + -KS[v]
t10[k,v] @bnhr   = eG * S[k,v]
KR[k,v] @bnhr    = k[k] * beta * e[v]
S_out[k,v] @bnhr = t10[k,v] + KR[k,v]
h0[k,v] @bhr     = input
t14[v] @bnhr     = sum k: q[k] * S_out[k,v]
scale[] @        = input
o[v] @bnhr       = t14[v] * scale
carry S <- S_out[k,v]   init h0[k,v]   final -> ht
output o = o[v]
"""


def test_the_forward_graph():
    assert str(forward_graph(Spec())) == FORWARD


def test_the_recurrence_is_the_graph_folded():
    folded = FoldToTokens().run(forward_graph(Spec()), TARGET)
    assert str(Rewrite("read_after_write").run(folded, TARGET)) == DECODE


@pytest.mark.parametrize("spec", FAMILY, ids=NAMES)
def test_graphs_agree_with_the_oracle(spec):
    for chunk in (1, 4, 16) if has_chunk_form(spec) else (1,):
        graph = verify(rebuild(forward_graph(spec), chunked=chunk > 1))
        for decays in ("mild", "mixed"):
            this = case(spec, T=13, B=2, H=2, R=3, decays=decays)
            found = graph_results(graph, evaluate(graph, graph_data(this), 13, chunk))
            assert max(errors(found, answer(this))) < EXACT, (chunk, decays)


@pytest.mark.parametrize("spec", [spec for spec in FAMILY if not has_chunk_form(spec)], ids=lambda spec: spec.name)
def test_a_write_strength_per_value_channel_has_no_chunk_form(spec):
    with pytest.raises(GraphError, match="has no chunk form"):
        verify(forward_graph(spec))


def test_chunk_length_1_has_no_token_axis():
    for spec in FAMILY:
        graph = verify(FoldToTokens().run(forward_graph(spec), TARGET))
        assert not graph.chunked
        assert not any(set(node.axes + node.summed) & set(TOKENS) for node in graph.nodes), spec
        assert not {node.op for node in graph.nodes} & {"decay", "uli", "tri", "cumsum"}, spec


@pytest.mark.parametrize("spec", FAMILY, ids=NAMES)
def test_rewrites_keep_values(spec):
    graph = forward_graph(spec)
    folded = FoldToTokens().run(graph, TARGET)
    data = graph_data(case(spec, T=11, H=2, decays="mixed"))
    for before in (graph, folded) if has_chunk_form(spec) else (folded,):
        wanted = evaluate(before, data, 11, 4)
        for rule in RULES:
            after = evaluate(verify(Rewrite(rule).run(before, TARGET)), data, 11, 4)
            for name in ("o", *(carry.final for carry in graph.carries)):
                torch.testing.assert_close(after[name], wanted[name], rtol=1e-9, atol=1e-9, msg=f"{rule} {name}")


def test_each_rewrite_changes_what_it_is_for():
    graph = forward_graph(Spec())
    outside = str(Rewrite("gate_out_of_inverse").run(graph, TARGET))
    assert "X0[i,j]" in outside and "= E[i,j] * X0[i,j]" in outside
    distributed = Rewrite("distribute_inverse").run(graph, TARGET)
    assert {"U", "W"} <= set(distributed.names)
    folded = FoldToTokens().run(graph, TARGET)
    reads = [str(form).count("sum k") for form in (folded, Rewrite("read_after_write").run(folded, TARGET))]
    assert reads == [3, 2]


# ---- views of a graph ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", FAMILY[::5], ids=NAMES[::5])
def test_the_networkx_view_is_the_same_graph(spec):
    for graph in forms(spec):
        flow = graph.dataflow
        assert flow.number_of_nodes() == len(graph.nodes) and nx.is_directed_acyclic_graph(flow)
        edges = sorted((ref.value, i) for i, node in enumerate(graph.nodes) for ref in node.args)
        assert sorted(flow.edges()) == edges  # x * x is two edges
        sources = {i for i in flow if not flow.in_degree(i)}
        assert sources == {i for i, node in enumerate(graph.nodes) if node.op in ("input", "carry_in", "const", "tri")}
        reached: list[set[str]] = []
        for node in graph.nodes:
            own = {str(node.attrs[0])} if node.op == "carry_in" else set()
            reached.append(own.union(*(reached[ref.value] for ref in node.args)))
        assert [set(graph.carried[i]) for i in range(len(graph.nodes))] == reached


def test_what_reads_the_state_is_sequential():
    graph = forward_graph(Spec())
    names = {name: i for i, name in enumerate(graph.names)}
    parallel = {name for name in ("E", "X", "P", "KS", "r", "o", "S_out") if not graph.carried[names[name]]}
    assert parallel == {"E", "X", "P"}


# ---- sharing ---------------------------------------------------------------------------------------------------------


def test_equal_values_are_shared_modulo_token_names():
    b = Builder()
    k, q = b.input("k", "ik", "bnh"), b.input("q", "ik", "bnh")
    gram = b.ein([k, k.renamed({"i": "j"})], "ij")
    again = b.ein([k.renamed({"i": "l"}), k.renamed({"i": "j"})], "jl")
    assert again.value == gram.value
    scores = b.ein([q, k.renamed({"i": "j"})], "ij")
    turned = b.ein([q.renamed({"i": "j"}), k], "ij")
    assert turned.value == scores.value != gram.value
    assert scores.axes == "ij" and turned.axes == "ji"  # the same value, read transposed
    assert b.apply("exp", turned) == Ref(b.apply("exp", scores).value, "ji")


def test_no_value_is_computed_twice():
    for spec, graph in [(member, graph) for member in FAMILY[::3] for graph in forms(member)]:
        assert len(set(graph.nodes)) == len(graph.nodes)
        grams = [n for n in graph.nodes if n.summed == "k" and len({ref.value for ref in n.args}) == 1]
        assert len(grams) <= (3 if spec.qk_norm else 1)  # k k^T once, beside two squared lengths


def test_grid_axes_are_ordered_and_sums_over_heads_are_last():
    b = Builder()
    x, w = b.input("x", "iv", "bnhr"), b.input("w", "iv", "bnh")
    total = b.ein([x, w], "i", grid="bnh")
    node = b[total]
    assert node.op == "ein" and node.summed == "r" and node.grid == "bnh" == "".join(a for a in GRID if a in "hnb")
    assert b[node.args[0]].grid == "bnhr" and b[node.args[0]].summed == "v"
