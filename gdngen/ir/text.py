"""Text form, one line per value: ``parse(str(graph)) == graph``.

KS[i,v] @bnhr    = eG[i] * t10[i,v]
t10[i,v] @bnhr   = sum k: k[i,k] * S[k,v]
carry S <- S_out[k,v]   init h0[k,v]   final -> ht
output o = o[i,v]
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from gdngen.errors import GraphError
from gdngen.ir.graph import AXES, GRID, Carry, Graph, Node, Ref

_LEAVES = ("input", "carry_in")
_REF = re.compile(r"^(\w+)(?:\[([a-z,]*)\])?$")


def value_names(graph: Graph, hints: bool = True) -> list[str]:
    """A unique name per value: the declared name of an input or carry, the hint where there is one, else t<id>."""
    names: list[str] = []
    taken = {str(node.attrs[0]) for node in graph.nodes if node.op in _LEAVES}
    for i, node in enumerate(graph.nodes):
        if node.op in _LEAVES:
            names.append(str(node.attrs[0]))
            continue
        name = (graph.names[i] if hints and graph.names else "") or f"t{i}"
        while name in taken:
            name = f"t{i}" if name != f"t{i}" else f"t{i}_"
        taken.add(name)
        names.append(name)
    return names


def render(graph: Graph, hints: bool = True) -> str:
    """The text form; without hints every computed value is called t<id>."""
    names = value_names(graph, hints)

    def show(ref: Ref) -> str:
        return names[ref.value] + (f"[{','.join(ref.axes)}]" if ref.axes else "")

    lines = [f"chunk {'C' if graph.chunked else '1'}"]
    for i, node in enumerate(graph.nodes):
        left = f"{names[i]}[{','.join(node.axes)}] @{node.grid}"
        lines.append(f"{left:<16} = {_right(node, show)}")
    for carry in graph.carries:
        line = f"carry {carry.name} <- {show(carry.out)}   init {show(carry.init)}   final -> {carry.final}"
        lines.append(line + ("   (last chunk to first)" if carry.reverse else ""))
    lines += [f"output {name} = {show(ref)}" for name, ref in graph.outputs]
    return "\n".join(lines) + "\n"


def comment(graph: Graph, i: int) -> str:
    """One computed value as its line says it, for readers: numbers and masks written out, a - b for a + -b."""
    names = value_names(graph)

    def show(ref: Ref) -> str:
        node = graph[ref]
        if node.op == "const":
            return f"{float(node.attrs[0]):g}"
        name = str(node.attrs[0]) if node.op == "tri" else names[ref.value]
        return name + (f"[{','.join(ref.axes)}]" if ref.axes else "")

    node = graph.nodes[i]
    return f"{show(Ref(i, node.axes))} = {_right(node, show)}".replace(" + -", " - ")


def _term(coef: float, body: str) -> str:
    return body if coef == 1 else f"-{body}" if coef == -1 else f"{coef!r} * {body}"


def signed(coef: str | float, body: str) -> tuple[str, str]:
    """The sign of a term and its text with the size of its coefficient."""
    size = abs(float(coef))
    return "-" if float(coef) < 0 else "+", (f"{size!r} * " if size != 1 else "") + body


def signed_sum(terms: Iterable[tuple[str | float, str]]) -> str:
    """Coefficients and texts as source; positive terms first, so that it does not start with a minus if it need not."""
    text = ""
    for coef, body in sorted(terms, key=lambda term: float(term[0]) < 0):
        sign, term = signed(coef, body)
        text = f"{text} {sign} {term}" if text else term if sign == "+" else f"-{term}"
    return text


def _right(node: Node, show: Callable[[Ref], str]) -> str:
    if node.op in _LEAVES:
        return node.op
    if node.op == "const":
        return f"const({float(node.attrs[0])!r})"
    if node.op == "ein":
        body = _term(float(node.attrs[0]), " * ".join(show(ref) for ref in node.args))
        return f"sum {','.join(node.summed)}: {body}" if node.summed else body
    if node.op == "add":
        terms = [_term(float(coef), show(ref)) for coef, ref in zip(node.attrs, node.args, strict=True)]
        return " + ".join(terms)
    head = f"{node.op}.{node.attrs[0]}" if node.attrs else node.op
    return f"{head}({', '.join(show(ref) for ref in node.args)})"


@lru_cache(maxsize=4096)
def parse(text: str) -> Graph:
    """Read the text form back.  GraphError names the line that cannot be read."""
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                reader.line(line.strip())
            except (ValueError, KeyError) as error:
                raise GraphError(f"graph text line {number}: cannot read {line.strip()!r} ({error})") from None
    return reader.graph()


class _Reader:
    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.nodes: list[Node] = []
        self.outputs: list[tuple[str, Ref]] = []
        self.carries: list[Carry] = []
        self.chunked = True

    def line(self, line: str) -> None:
        if line.startswith("chunk "):
            self.chunked = line == "chunk C"
        elif line.startswith("carry "):
            found = re.match(r"carry (\w+) <- (\S+)\s+init (\S+)\s+final -> (\w+)(\s+\(last chunk to first\))?$", line)
            if not found:
                raise ValueError("expected: carry NAME <- REF   init REF   final -> NAME")
            name, out, init, final, reverse = found.groups()
            self.carries.append(Carry(name, self.ref(out), self.ref(init), final, bool(reverse)))
        elif line.startswith("output "):
            name, ref = line.removeprefix("output ").split(" = ")
            self.outputs.append((name, self.ref(ref)))
        else:
            self.value(line)

    def value(self, line: str) -> None:
        left, right = (part.strip() for part in line.split(" = ", 1))
        found = re.match(r"(\w+)\[([a-z,]*)\] @([bnhr]*)$", left)
        if not found:
            raise ValueError("expected: NAME[AXES] @GRID = ...")
        name, axes, grid = found[1], found[2].replace(",", ""), found[3]
        if not set(axes) <= set(AXES) or not set(grid) <= set(GRID):
            raise ValueError(f"unknown axis in {left}")
        op, args, attrs = self.right(name, right)
        self.ids[name] = len(self.nodes)
        self.nodes.append(Node(op, args, attrs, axes, grid))

    def right(self, name: str, text: str) -> tuple[str, tuple[Ref, ...], tuple[str | float, ...]]:
        if text in _LEAVES:
            return text, (), (name,)
        if found := re.match(r"const\((.*)\)$", text):
            return "const", (), (float(found[1]),)
        if found := re.match(r"([a-z_0-9]+)(?:\.(\w+))?\((.*)\)$", text):
            args = tuple(self.ref(part) for part in found[3].split(", ")) if found[3] else ()
            return found[1], args, (found[2],) if found[2] else ()
        if found := re.match(r"sum ([a-z,]+): (.*)$", text):
            coef, refs = self.product(found[2])
            return "ein", refs, (coef, found[1].replace(",", ""))
        if " + " in text:
            terms = [self.product(term) for term in text.split(" + ")]
            return "add", tuple(refs[0] for _, refs in terms), tuple(coef for coef, _ in terms)
        coef, refs = self.product(text)
        return "ein", refs, (coef, "")

    def product(self, text: str) -> tuple[float, tuple[Ref, ...]]:
        factors = text.split(" * ")
        coef = 1.0
        if not _REF.match(factors[0]) or factors[0].replace(".", "").isdigit():
            if factors[0].startswith("-") and _REF.match(factors[0][1:]) and not factors[0][1:2].isdigit():
                coef, factors[0] = -1.0, factors[0][1:]
            else:
                coef = float(factors.pop(0))
        return coef, tuple(self.ref(factor) for factor in factors)

    def ref(self, text: str) -> Ref:
        found = _REF.match(text)
        if not found or found[1] not in self.ids:
            raise ValueError(f"unknown value {text!r}")
        return Ref(self.ids[found[1]], (found[2] or "").replace(",", ""))

    def graph(self) -> Graph:
        names = {i: name for name, i in self.ids.items()}
        hints = tuple(
            "" if node.op in _LEAVES or names[i] == f"t{i}" else names[i] for i, node in enumerate(self.nodes)
        )
        return Graph(tuple(self.nodes), tuple(self.outputs), tuple(self.carries), self.chunked, hints)
