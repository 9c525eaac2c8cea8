"""Spec -> Plan: the ordered passes, each checked by structure and by evaluation of a tiny instance in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

from gdngen.errors import GraphError, PinError
from gdngen.ir.family import forward_graph
from gdngen.ir.graph import Graph
from gdngen.ir.verify import verify
from gdngen.passes.backward import Backward
from gdngen.passes.check import check_gradients, check_graph, check_joint, check_plan
from gdngen.passes.fuse import Cut, Cutter, pinned
from gdngen.passes.plan import Kernel, Operator, OperatorName, Plan, Stored
from gdngen.passes.precision import Precision
from gdngen.passes.price import WORKLOADS, Price, extents, pareto, price, seconds_overall
from gdngen.passes.regroup import Regroup
from gdngen.passes.rewrite import FoldToTokens, Rewrite
from gdngen.passes.save import Keep, Save
from gdngen.passes.segment import Segment
from gdngen.passes.tile import Tile, block, blocked_products, shortest
from gdngen.passes.untangle import untangled
from gdngen.passes.writable import obstacle
from gdngen.spec import Spec
from gdngen.target import Target

DEFAULT_CHUNK = 64
KEEP_WITHIN = 1.5  # cuts slower than this many times the best are not worth offering
FORMS: tuple[tuple[str, ...], ...] = ((), ("distribute_inverse",), ("gate_out_of_inverse",))
FOLD = FoldToTokens()  # decode is the chunk graph at chunk length 1
READ = Rewrite("read_after_write")  # only there may o read the state just written: one product with q, not two
LOWERING = (
    Precision(),  # after fuse: which products stay in fp32, and how stored values are kept
    Save(),  # after precision: only what is kept alike can be handed over
    Tile(),  # orders and sizes follow from everything above
    Segment(),  # last: of scans that tile v
)
BACKWARD = Backward(joint=True)  # reverse mode over the Spec's graph; one graph with both scans
REGROUP = Regroup()  # terms that share an operand become one product: before fuse, which counts products
PIN_KEYS = ("cut", "backward_cut", "save", "inverse", "BV")


@dataclass(frozen=True)
class Candidate:
    """A cut with its predicted seconds (geometric mean over the workloads) and its price at each of them."""

    cut: Cut
    seconds: float
    prices: tuple[Price, ...]


@dataclass(frozen=True)
class Choice:
    """An operator (before lowering) and the cut it was made from; the cuts worth keeping and the rejected ones.

    Both cheapest first; a pinned cut need not be among them."""

    operator: Operator
    cut: Cut
    kept: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    @property
    def front(self) -> tuple[Candidate, ...]:
        """Kept and rejected, cheapest first."""
        return self.kept + self.rejected


@dataclass(frozen=True)
class Compilation:
    """Everything between Spec and Source, each stage under the name of the pass that made it."""

    spec: Spec
    target: Target
    chunk: int
    stages: Mapping[str, Graph | Plan]
    plan: Plan
    choices: Mapping[str, Choice] = field(default_factory=dict)  # by operator
    pins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # forms that were left out


def read_pins(pins: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE texts as a dict; PinError for a key that no pass decides."""
    found: dict[str, str] = {}
    for text in pins:
        key, separator, value = text.partition("=")
        if not separator or key not in PIN_KEYS:
            raise PinError(f"pin {text!r}: expected KEY=VALUE with KEY one of {', '.join(PIN_KEYS)}")
        if found.setdefault(key, value) != value:
            raise PinError(f"pin {text}: {key}={found[key]} is pinned as well; give one of them")
    return found


@lru_cache(maxsize=64)
def compile_spec(spec: Spec, target: Target, pins: tuple[str, ...] = ()) -> Compilation:
    """Run all passes.  PinError when a pin cannot be honoured, PlanError when a graph has no legal plan."""
    return _Pipeline(spec, target, read_pins(pins)).run()


class _Pipeline:
    def __init__(self, spec: Spec, target: Target, pins: dict[str, str]) -> None:
        self.spec, self.target, self.pins = spec, target, pins
        self.chunk = DEFAULT_CHUNK if spec.chunk == "auto" else int(spec.chunk)
        self.stages: dict[str, Graph | Plan] = {}
        self.missing: list[tuple[str, str]] = []
        self.notes: list[str] = []

    def run(self) -> Compilation:
        lowering = self._lowering()  # what is wrong with pins is said before the search, which takes seconds
        differentiable = self.spec.backward and not no_chunk_form(self.spec)
        if not differentiable and (idle := sorted({"backward_cut", "save"} & self.pins.keys())):
            raise PinError(f"pin {idle[0]}={self.pins[idle[0]]}: a package of this Spec has no backward kernels")
        graph = forward_graph(self.spec)
        self.stages["graph"] = graph
        if self.spec.backward and not no_chunk_form(self.spec):
            check_gradients(verify(graph))  # first: a fault of the mathematics is no fault of a pass
        chosen = self._chunk_choice(graph)
        backward = self._backward_choice(graph) if differentiable else None
        operators = [choice.operator for choice in (chosen, backward) if choice] + [self._recurrent_operator(graph)]
        plan = Plan(
            spec=self.spec,
            target=self.target.name,
            chunk=self.chunk,
            operators=tuple(operators),
            pins=tuple(f"{key}={value}" for key, value in self.pins.items()),
            missing=tuple(self.missing),
        )
        self.stages["fuse"] = check_plan(plan, graph)
        for step in lowering:
            plan = check_plan(step.run(plan, self.target), graph)
            self.stages[step.name] = plan
        choices: dict[str, Choice] = {choice.operator.name: choice for choice in (chosen, backward) if choice}
        return Compilation(self.spec, self.target, self.chunk, self.stages, plan, choices, self.pins, tuple(self.notes))

    def _lowering(self) -> tuple[Precision | Save | Tile | Segment, ...]:
        """The passes with their pins."""
        keep, width = self.pins.get("save"), self.pins.get("BV")
        if self.pins.get("inverse", "tf32") != "tf32":
            raise PinError(f"pin inverse={self.pins['inverse']}: only tf32 (fp32 operands) can be pinned, or nothing")
        if "inverse" in self.pins and (self.spec.rule == "additive" or no_chunk_form(self.spec)):
            raise PinError(f"pin inverse={self.pins['inverse']}: kernels of this Spec invert nothing")
        if keep not in (None, "memory", "speed"):
            raise PinError(
                f"pin save={keep}: keep for backward as little as possible (memory) or what saves time (speed)"
            )
        if width is not None and (not width.isdigit() or int(width) not in (16, 32, 64, 128, 256)):
            raise PinError(f"pin BV={width}: the tile of v is 16, 32, 64, 128 or 256")
        if width is not None and int(width) > block(self.spec.value_dim):
            raise PinError(f"pin BV={width}: wider than the {self.spec.value_dim} value channels")
        precision, save, tile, segment = LOWERING
        saving = replace(save, keep=cast(Keep | None, keep))
        return precision, saving, replace(tile, block_v=int(width) if width else None), segment

    # ---- the chunk operators: every form of the graph is cut in every legal way, the cheapest cut wins

    def _chunk_choice(self, graph: Graph) -> Choice | None:
        reason = no_chunk_form(self.spec)
        if reason:
            if "cut" in self.pins:
                raise PinError(f"pin cut={self.pins['cut']}: {reason}")
            self.missing.append(("chunk", reason))
            return None
        verify(graph)
        return self._choice("chunk", self._cuts(graph), "cut", Cutter(graph).why_not())

    def _backward_choice(self, graph: Graph) -> Choice | None:
        joint = self.stages["backward"] = verify(BACKWARD.run(graph, self.target))
        regrouped = self._rewritten(REGROUP, joint, graph, check_joint)
        joint = self.stages[REGROUP.name] = regrouped or joint
        cutter = Cutter(joint)
        cuts = list(cutter.all(self._seconds))
        if all(map(self._obstacle, cuts)) and (grown := cutter.grown(_blocked)):
            cuts.append(replace(grown, kernels=tuple(map(untangled, grown.kernels))))
        return self._choice("chunk_backward", cuts, "backward_cut", cutter.why_not())

    def _choice(self, name: OperatorName, cuts: list[Cut], pin: str, illegal: str) -> Choice | None:
        """The cheapest cut that can be written, or the pinned one; None and a note where there is none, with what
        stands in the way: ``illegal`` where no cut is legal."""
        priced = [(cut, self._price(cut)) for cut in cuts]
        reason = self._obstacle(min(priced, key=lambda pair: pair[1].seconds)[0]) if priced else illegal
        best = pareto(priced)
        while wrong := [pair for pair in best if self._obstacle(pair[0])]:
            priced = [pair for pair in priced if pair not in wrong]
            best = pareto(priced)
        front = [self._candidate(cut) for cut, _ in best]
        front.sort(key=lambda candidate: candidate.seconds)
        if not front:
            if pin in self.pins:
                raise PinError(f"pin {pin}={self.pins[pin]}: no cut of this graph can be written; {reason}")
            self.missing.append((name, f"no cut of its graph can be written; {reason}"))
            return None
        kept = tuple(c for c in front if c.seconds <= KEEP_WITHIN * front[0].seconds)
        rejected = tuple(c for c in front if c not in kept)
        cut = pinned([c.cut for c in front] + cuts, self.pins[pin], pin) if pin in self.pins else kept[0].cut
        if found := self._obstacle(cut):
            others = ", ".join(c.cut.name for c in front)
            raise PinError(f"pin {pin}={cut.name}: it cannot be written; {found}; the best cuts that can are {others}")
        stored = tuple(
            Stored(
                name=stored_name,
                axes=cut.graph.nodes[i].axes,
                heads="value" if "r" in cut.graph.nodes[i].grid else "group",
                format="input",
                writer=cut.writers[i],
            )
            for i, stored_name in cut.written()
        )
        totals = tuple(output for output, ref in cut.graph.outputs if "n" in cut.graph[ref].summed)
        operator = Operator(
            name=name,
            graph=str(cut.graph),
            cut=cut.name,
            forms=cut.forms,
            stored=stored,
            kernels=cut.kernels,
            totals=totals,
        )
        return Choice(operator, cut, kept, rejected)

    def _price(self, cut: Cut) -> Price:
        """At the first workload."""
        return price(cut, self.spec, self.chunk, self.target, WORKLOADS[0])

    def _seconds(self, cut: Cut) -> float:
        return self._price(cut).seconds

    def _obstacle(self, cut: Cut) -> str:
        """What keeps a cut from being written, or an empty text."""
        sizes = extents(self.spec, shortest(self.spec, self.chunk))
        return next(filter(None, (obstacle(kernel, sizes, self.target) for kernel in cut.kernels)), "")

    def _cuts(self, graph: Graph) -> list[Cut]:
        seen, cuts = set[Graph](), list[Cut]()
        for forms in FORMS:
            if "gate_out_of_inverse" in forms and not self.spec.qk_norm:
                continue  # without the gate the inverse is bounded for unit keys only (contract section 4)
            form: Graph | None = graph
            for rule in forms:
                form = self._rewritten(Rewrite(rule), form, graph, check_graph) if form else None
            if forms and form:
                self.stages["+".join(forms)] = form
            if form and form not in seen:
                seen.add(form)
                cuts += Cutter(form, forms).all(self._seconds)
        return cuts

    def _rewritten(
        self, step: Rewrite | Regroup, graph: Graph, reference: Graph, check: Callable[[Graph, Graph], Graph]
    ) -> Graph | None:
        """The graph after a rewrite; None and a note where the rule does not hold for this member."""
        try:
            return check(step.run(graph, self.target), reference)
        except GraphError as error:
            self.notes.append(f"form {step.name} is left out: {error}")
            return None

    def _candidate(self, cut: Cut) -> Candidate:
        prices = tuple(price(cut, self.spec, self.chunk, self.target, workload) for workload in WORKLOADS)
        return Candidate(cut, seconds_overall(prices), prices)

    # ---- the recurrent operator

    def _recurrent_operator(self, graph: Graph) -> Operator:
        try:
            folded = self.stages[FOLD.name] = check_graph(FOLD.run(graph, self.target), graph)
        except GraphError as error:
            raise GraphError(
                f"this member is not what its graph says in chunks of one token ({error}): what a chunk gives may not "
                "depend on where chunks begin; correct its Family"
            ) from None
        read = self._rewritten(READ, folded, graph, check_graph)
        folded = self.stages[READ.name] = read or folded
        kernel = Kernel(name="recurrence", loop="tokens", text=str(folded))
        forms = (FOLD.name, READ.name) if read else (FOLD.name,)
        return Operator(name="recurrent", graph=str(folded), cut="none", forms=forms, stored=(), kernels=(kernel,))


def _blocked(cut: Cut) -> int:
    """Products of all kernels that have no legal axis order."""
    return sum(blocked_products(kernel.text) for kernel in cut.kernels)


def no_chunk_form(spec: Spec) -> str:
    """Why this member has no chunk kernels, or an empty text."""
    if spec.rule == "delta" and spec.beta == "value":
        return "a write strength per value channel under the delta rule has no chunk form; use the recurrent operator"
    return ""
