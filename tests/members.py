"""Members from outside that are made of parts which the family does not use."""

from typing import ClassVar

from gdngen.ir.family import Family
from gdngen.ir.graph import Carry
from gdngen.spec import Spec

SMALL = {"key_dim": 16, "value_dim": 16, "chunk": 16}


class CubicFamily(Family):
    """A write strength from a product that holds k twice."""

    def write_strength(self, k, softplus):
        b = self.build
        return b.name(b.apply("sigmoid", b.ein([self.feature("q"), k, k], "i")), "alpha")


class Cubic(Spec):
    family: ClassVar[type[Family]] = CubicFamily


class TwoInversesFamily(Family):
    """r = X (I + A) X y: a matrix over tokens between two inverses.  It is the delta rule."""

    def between_inverses(self, matrix):
        return self.build.add(self.build.tri("same"), matrix)

    def residual(self, k, v, beta, decays, state):
        b = self.build
        start = [decay.start for decay in decays.values()]
        pairs = [beta, *self.between(decays, inside=True), b.tri("strict"), k, k.renamed({"i": "j"})]
        matrix = b.ein(pairs, "ij")
        inverse = product = b.inverse(matrix)
        for factor in (self.between_inverses(matrix), inverse):
            product = b.ein([factor, product.renamed({"i": "j", "j": "l"})], "il").renamed({"l": "j"})
        error = b.add(v, b.ein([k, *start, state], "iv"), coefs=(1.0, -1.0))
        written = b.mul(beta, error).renamed({"i": "j"})
        return b.ein([product, *self.between(decays, inside=False), written], "iv")


class TwoInverses(Spec):
    family: ClassVar[type[Family]] = TwoInversesFamily


class OneInverseTooManyFamily(TwoInversesFamily):
    """r = X A X y, which is 0 in chunks of one token."""

    def between_inverses(self, matrix):
        return matrix


class OneInverseTooMany(Spec):
    family: ClassVar[type[Family]] = OneInverseTooManyFamily


class SquaredValuesFamily(Family):
    """Values are written by their squares: the gradient of the write strength sums a product that holds v twice."""

    def residual(self, k, v, beta, decays, state):
        return self.build.mul(beta, v, v)


class SquaredValues(Spec):
    family: ClassVar[type[Family]] = SquaredValuesFamily


class DeltaProductFamily(Family):
    """Two writes a token, each the delta rule: the second reads what the first left.

    Both are solved together: r2 = X2 (y2 - A21 X1 y1) and r1 = X1 (y1 - A12 r2), where X1 = (I + A11)^-1 and
    X2 = (I + A22 - A21 X1 A12)^-1."""

    def graph(self):
        b = self.build
        decays = self.decays("scalar", None)
        state = b.carry_in("S", "kv")
        q, *keys = (b.input(name, "ik", "bnh") for name in ("q", "k", "k2"))
        strengths = [b.input(name, "i", "bnhr") for name in ("beta", "beta2")]
        values = [b.input(name, "iv", "bnhr") for name in ("v", "v2")]

        def pairs(row, column, strict):
            return b.ein([row, decays.between, *([b.tri("strict")] * strict), column.renamed({"i": "j"})], "ij")

        def solved(matrix, right):
            names = {"i": "j", "j": "l"}
            product = b.ein([matrix, right.renamed(names)], right.axes.replace("j", "l"))
            return product.renamed({"l": "j"})

        def read(key):
            return b.ein([key, decays.start, state], "iv")

        writes = [b.mul(s, b.add(v, read(k), coefs=(1, -1))) for s, v, k in zip(strengths, values, keys, strict=True)]
        rows = [b.mul(s, k) for s, k in zip(strengths, keys, strict=True)]
        first = b.inverse(pairs(rows[0], keys[0], True))
        crossed, later = solved(pairs(rows[1], keys[0], False), first), pairs(rows[0], keys[1], True)
        second = b.inverse(b.add(pairs(rows[1], keys[1], True), solved(crossed, later), coefs=(1, -1)))
        r2 = b.name(solved(second, b.add(writes[1], solved(crossed, writes[0]), coefs=(1, -1))), "r2")
        r1 = b.name(solved(first, b.add(writes[0], solved(later, r2), coefs=(1, -1))), "r1")
        left = [b.ein([k, decays.end, r], "kv") for k, r in zip(keys, (r1, r2), strict=True)]
        within = [solved(pairs(q, k, False), r) for k, r in zip(keys, (r1, r2), strict=True)]
        out = b.name(b.add(b.mul(decays.whole, state), *left), "S_out")
        o = b.mul(b.input("scale", "", ""), b.add(read(q), *within))
        return b.finish([("o", b.name(o, "o"))], [Carry("S", out, b.input("h0", "kv", "bhr"), "ht")])


class DeltaProduct(Spec):
    family: ClassVar[type[Family]] = DeltaProductFamily
