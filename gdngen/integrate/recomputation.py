"""Activation checkpointing: what a backward computes again, it computes with the functions that the forward used.

Such a backward may come after the operators were taken out of a layer, or put in.  So a forward that leaves a graph
leaves a Note with it, alive as long as the graph: a recomputation, which runs inside a backward, follows the notes of
its layer.  Reentrant checkpointing leaves no graph: its recomputations follow the operators that are there by then.
"""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from gdngen.errors import ArgumentError

Forward = Callable[..., Any]


class Note:
    """One forward of a layer: by which function.  ``spent``: a backward went through its graph."""

    def __init__(self, function: Forward) -> None:
        self.function, self.spent = function, False

    def spend(self) -> None:
        self.spent = True


_notes: WeakKeyDictionary[nn.Module, WeakSet[Note]] = WeakKeyDictionary()
_without_graph: WeakSet[nn.Module] = WeakSet()


def forward(layer: nn.Module, function: Forward, own: Forward, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """``function(layer, ...)``; inside a backward the function, this one or ``own``, that it computes again."""
    if torch.compiler.is_compiling():
        return function(layer, *args, **options)
    if torch._C._current_graph_task_id() != -1:
        return _recorded(layer, function, own)(layer, *args, **options)
    output = function(layer, *args, **options)
    graphs = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
    if graphs:
        _attach(layer, Note(function), graphs[0])
    else:
        _without_graph.add(layer)
    return output


def is_awaited(layer: nn.Module, own: Forward) -> bool:
    """Whether a graph of this layer, made with other functions than its own, may still be computed again."""
    return any(note.function is not own for note in _notes.get(layer, ()))


def _attach(layer: nn.Module, note: Note, graph: Any) -> None:
    def at_backward(*_: Any) -> None:
        # Not at once: what this node saved nothing for is computed again only further down the graph.
        torch.autograd.Variable._execution_engine.queue_callback(note.spend)

    graph.register_hook(at_backward)  # holds the note while the graph lives
    _notes.setdefault(layer, WeakSet()).add(note)


def _recorded(layer: nn.Module, function: Forward, own: Forward) -> Forward:
    notes = list(_notes.get(layer, ()))
    functions = {note.function for note in notes if not note.spent} or {note.function for note in notes}
    if len(functions) > 1:
        raise ArgumentError(
            f"module: a backward computes a {type(layer).__name__} again, while forwards with and without operators "
            "wait for theirs, and which of them this is cannot be told; run the backward of one before the other's "
            "forward"
        )
    if functions:
        return functions.pop()
    return function if layer in _without_graph else own


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
