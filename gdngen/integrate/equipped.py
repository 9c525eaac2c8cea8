"""Layers with operators: a subclass of the layer's own class, so that whatever a layer goes through, they go with it.

The operators are no attribute of the layer.  A copy, a replica on another GPU, a pickled layer has them as it has its
class; torch.compile guards on the class; and hooks that wrap ``forward`` in an attribute of the layer, before or after,
stay as they are: what they hold of the layer's own forward looks the class up when it is called.
"""

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from gdngen.errors import ArgumentError
from gdngen.integrate import recomputation

COMPUTES = "_computes"  # attribute of the classes made here: what a forward does
DISPATCHES = "_dispatches"  # attribute of the forwards made here, which hold a layer's own for good


class Role(NamedTuple):
    """An operator, the layer's name for it (an attribute or a global), and the keywords that are passed on to it.

    None: the operator is made for the layer, and takes whatever the layer says.
    """

    operator: str
    name: str
    taken: frozenset[str] | None


@dataclass(frozen=True, eq=False)
class Equipment:
    """What the class of layers with operators is made of.

    ``held``: the functions are attributes of the layer, and not globals.  ``whole``: the operator that is all of the
    layer's forward, "" if only functions in it are replaced.  Copying a layer leaves it as it is; pickling writes the
    name of a package, which is imported where the layer is loaded.
    """

    layer: type[nn.Module]
    held: bool
    operators: Any
    roles: tuple[Role, ...]
    whole: str = ""

    def __copy__(self) -> "Equipment":
        return self

    def __deepcopy__(self, memo: object) -> "Equipment":
        return self

    def __reduce__(self) -> Any:
        name = self.operators.__name__ if isinstance(self.operators, types.ModuleType) else None
        return _loaded, (self.layer, self.held, name or self.operators, self.roles, self.whole)


def _loaded(layer: type[nn.Module], held: bool, operators: Any, roles: tuple[Role, ...], whole: str = "") -> Equipment:
    if isinstance(operators, str):
        try:
            operators = importlib.import_module(operators)
        except ImportError as error:
            raise ArgumentError(
                f"operators: this {layer.__name__} was saved with those of the package {operators}, which cannot be "
                f"imported here ({error}); put its folder's parent on sys.path, or save the layer without operators"
            ) from error
    return Equipment(layer, held, operators, roles, whole)


class Equipped:
    """A layer with operators."""

    equipment: ClassVar[Equipment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.equipment,), *_state(self, protocol)


class Stripped:
    """A layer whose operators were taken out while a backward might still compute its forwards again."""

    equipment: ClassVar[Equipment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _made, (self.equipment.layer,), *_state(self, protocol)


def _state(layer: Any, protocol: Any) -> tuple[Any, ...]:
    reduced: Any = object.__reduce_ex__(layer, max(int(protocol), 2))
    return tuple(reduced[2:])


def _rebuilt(equipment: Equipment) -> Any:
    return _made(equipped_class(equipment))


def _made(cls: Any) -> Any:
    return cls.__new__(cls)


def own_class(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer, whatever was done to it here."""
    found = _made_here(layer)
    return type(layer) if found is None else _with_base(type(layer), found, found.equipment.layer)


def equip(layer: nn.Module, cls: type) -> None:
    own = own_class(layer).forward
    for held, put in _held(layer):
        if _is_forward(held, layer, own):
            put(types.MethodType(_dispatching(own), layer) if isinstance(held, types.MethodType) else _dispatching(own))
    layer.__class__ = cls


def strip(layer: nn.Module) -> None:
    """Take the operators out; nothing happens to a layer without."""
    if (made := _made_here(layer)) is None:
        return
    own = made.equipment.layer
    if recomputation.is_awaited(layer, _without_operators(made.equipment)):
        layer.__class__ = _with_base(type(layer), made, _stripped_class(made.equipment))
    else:
        layer.__class__ = _with_base(type(layer), made, own)


def holds_forward(layer: nn.Module) -> bool:
    """Whether calling the layer can reach its own forward: it is not replaced, or can be found in what replaces it."""
    if "forward" not in vars(layer):
        return True
    own = own_class(layer).forward
    return any(_is_forward(value, layer, one) for value in _reached(layer) for one in (own, _dispatching(own)))


# ---- classes ---------------------------------------------------------------------------------------------------------

_classes: WeakValueDictionary[Any, type] = WeakValueDictionary()


def equipped_class(equipment: Equipment) -> type:
    """One class for the same layers and operators: compiled code is found again when they come back."""
    base = equipment.layer
    key = (base, base.forward, id(equipment.operators), equipment.roles, equipment.whole)
    if (found := _classes.get(key)) is None:
        operators = {role: getattr(equipment.operators, role.operator) for role in equipment.roles}
        functions = {role.name: f if role.taken is None else _adapt(f, role) for role, f in operators.items()}
        forward = _with_operators(equipment, functions)
        body = {name: _covering(name, function) for name, function in functions.items()} if equipment.held else {}
        found = _classes[key] = _subclass(Equipped, equipment, forward, body)
    return found


def _stripped_class(equipment: Equipment) -> type:
    own = _without_operators(equipment)

    def computes(self: nn.Module, *args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and not recomputation.is_awaited(self, own):
            strip(self)
        return recomputation.forward(self, own, own, args, options)

    return _subclass(Stripped, equipment, computes, {})


def _subclass(mixin: type, equipment: Equipment, computes: Any, body: dict[str, Any]) -> type:
    base = equipment.layer
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"equipment": equipment, "forward": _dispatching(base.forward), COMPUTES: computes}
    return type(base.__name__, (mixin, base), names | own | body)


def _with_operators(equipment: Equipment, functions: dict[str, Any]) -> Any:
    own, without = equipment.layer.forward, _without_operators(equipment)
    if equipment.whole:
        function = getattr(equipment.operators, equipment.whole)
    else:
        function = _only(own, equipped=True) if equipment.held else _rebind(own, functions)

    def computes(self: nn.Module, *args: Any, **options: Any) -> Any:
        return recomputation.forward(self, function, without, args, options)

    return computes


def _without_operators(equipment: Equipment) -> Any:
    own = equipment.layer.forward
    return _only(own, equipped=False) if equipment.held else own


@functools.cache
def _only(own: Any, equipped: bool) -> Any:
    """A forward that finds its functions in attributes of the layer, and so cannot be recomputed with others."""

    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        if isinstance(self, Equipped) != equipped:
            raise ArgumentError(
                f"module: a backward computes a {type(self).__name__} again, whose operators were "
                f"{'taken out' if equipped else 'put in'} after the forward; run the backward before that"
            )
        return own(self, *args, **options)

    return forward


@functools.cache
def _dispatching(own: Any) -> Any:
    """A forward that does what the layer's class says at the time of the call."""

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        return getattr(type(self), COMPUTES, own)(self, *args, **options)

    setattr(forward, DISPATCHES, True)
    return forward


def _covering(name: str, function: Any) -> property:
    """The function in place of the layer's attribute, which stays where it is and can be assigned to."""

    def assign(self: nn.Module, value: Any) -> None:
        vars(self)[name] = value

    return property(lambda self: function, assign)


def _made_here(layer: nn.Module) -> Any:
    """The class made here among those of a layer, or None."""
    made = (cls for cls in type(layer).__mro__ if issubclass(cls, (Equipped, Stripped)) and "equipment" in vars(cls))
    return next(made, None)


def _with_base(cls: type, old: type, new: type) -> Any:
    """The class with another ancestor: one made here may have been subclassed since, for parametrised weights say."""
    if cls is old:
        return new
    bases = tuple(_with_base(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    return type(cls)(cls.__name__, bases, {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})


# ---- what holds a layer's own forward --------------------------------------------------------------------------------


def _is_forward(value: Any, layer: nn.Module, function: Any) -> bool:
    """Whether it is the function, bound to the layer or not at all (wrappers may take it from the class)."""
    return value is function or (
        isinstance(value, types.MethodType) and value.__self__ is layer and value.__func__ is function
    )


def _held(layer: nn.Module) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """What the layer's attributes hold, and closures and objects behind them, each with its setter."""
    seen = {id(layer)}
    for name, value in list(vars(layer).items()):
        yield value, functools.partial(vars(layer).__setitem__, name)
        yield from _held_behind(value, seen)


def _held_behind(value: Any, seen: set[int]) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    slots = list(_slots(value))
    yield from slots
    for part in (*_parts(value), *(held for held, _ in slots)):
        yield from _held_behind(part, seen)


def _slots(value: Any) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """What can be replaced in a function or an object of somebody's class: (content, its setter)."""
    if hasattr(value, DISPATCHES):
        return
    if isinstance(value, types.FunctionType):
        for cell in filter(_is_filled, value.__closure__ or ()):
            yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
    elif callable(value) and not isinstance(value, (type, types.MethodType, functools.partial, nn.Module)):
        for name, held in list(getattr(value, "__dict__", {}).items()):
            yield held, functools.partial(setattr, value, name)


def _parts(value: Any) -> tuple[Any, ...]:
    """What a callable holds for good."""
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    return ()


def _reached(layer: nn.Module) -> Iterator[Any]:
    """What a call may get to from what is in the place of the layer's forward, and can be replaced there.

    Wrappers hold the forward that they call, or say the name of an attribute of the layer that does.
    """
    attributes, seen = vars(layer), {id(layer)}
    left = [attributes["forward"]]
    yield left[0]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        found = [held for held, _ in _slots(value)]
        if isinstance(value, types.FunctionType):
            found += [attributes[name] for name in _words(value.__code__) if name in attributes]
        yield from found
        left += [*found, *_parts(value)]


def _words(code: types.CodeType) -> Iterator[str]:
    """Names and strings in a function and in those inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _words(constant)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# ---- functions -------------------------------------------------------------------------------------------------------


def _adapt(function: Callable[..., Any], role: Role) -> Callable[..., Any]:
    """The operator as a layer calls it.  A model hands the same keywords to all its layers: what the layer's own
    function does not take by name is left out, as that function ignores it too.  Offsets of packed sequences, which
    change the result, are an error instead.
    """
    accepted, taken = frozenset(inspect.signature(function).parameters), role.taken or frozenset()

    @functools.wraps(function)
    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        if options.get("cu_seqlens") is None:
            _refuse_unread_offsets(options)
        for name in options:
            if name in taken and name not in accepted and options[name] is not None:
                raise ArgumentError(f"{name}: the layer passed it, and {role.operator} does not take it; leave it out")
        given = {name: options[name] for name in options if name in taken and name in accepted}
        return function(query, key, value, **given)

    return call


def _refuse_unread_offsets(options: dict[str, Any]) -> None:
    for name in ("cu_seq_lens_q", "seq_idx"):
        if options.get(name) is not None:
            if "cu_seqlens" in options:
                advice = "packed sequences are given to this layer as cu_seq_lens_q; pass that to the model too"
            else:
                advice = (
                    "this layer hands offsets of packed sequences to nothing that reads them, on its own path either, "
                    "and would carry the state from one sequence into the next; pass padded sequences, one a row"
                )
            raise ArgumentError(f"{name}: {advice}")


def _rebind(function: Any, scope: dict[str, Callable[..., Any]]) -> Any:
    """A copy of ``function`` that sees ``scope`` before its module's globals; its functools.wraps decorators stay."""
    inner = getattr(function, "__wrapped__", None)
    names, cells = function.__globals__, function.__closure__ or ()
    if inner is None:
        # Without a name: torch.compile takes globals for those of the module that they name.
        names = {name: value for name, value in (names | scope).items() if name != "__name__"}
    elif not any(cell.cell_contents is inner for cell in cells):
        raise ArgumentError(f"module: the decorator around {function.__qualname__} does not hold the function it wraps")
    else:
        inner_copy = _rebind(inner, scope)
        cells = tuple(types.CellType(inner_copy) if cell.cell_contents is inner else cell for cell in cells)
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    functools.update_wrapper(copy, function)
    copy.__kwdefaults__ = function.__kwdefaults__
    del copy.__wrapped__  # type: ignore[attr-defined]
    if inner is not None:
        copy.__wrapped__ = inner_copy  # type: ignore[attr-defined]
    return copy
