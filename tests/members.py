"""Members from outside that are made of parts which the family does not use."""

from typing import ClassVar

from gdngen.ir.family import Family
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
