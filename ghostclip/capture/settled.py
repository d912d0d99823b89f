"""Operations that were met before: what was decided on one holds for all forwards, whatever their number of samples.

How an operation is consumed follows from its parameters and the form of its data where a rule says so. Only what can
change from forward to forward is looked at again: which axis holds the samples, whether rows were put into another
order on the way, whether data outside the graph is data at all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ghostclip.capture.attach import carry_out
from ghostclip.capture.growth import UNKNOWN
from ghostclip.capture.inputs import in_backward
from ghostclip.capture.operation import Operation
from ghostclip.capture.rows import row_maps
from ghostclip.capture.sites import key_of
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.capture.usage import MAX_ATTEMPTS, Site, Use
from ghostclip.rules import Captured, Rule, follows_from_form, rule_for

if TYPE_CHECKING:
    from ghostclip.capture.session import Session

# More forms than this are no forms: something in the arguments is new each time.
_MOST: Final = 4096
_VALUES: Final = frozenset({type(None), bool, int, float, str})


@dataclass(eq=False)
class _Form:
    """One operation on its parameters.

    Attributes:
        name: Its name.
        targets: The tracked arguments by the rule's names.
        tracked: Where they stand among the arguments: numbers of positions, names of keywords.
        rows: Where its data stands.
        captured: What the rule made of it; the tensors in it are dropped.
        rule: The rule.
        key: The names of its parameters, and its own.
        sites: Its call site, and the axis that holds samples, by the number of the call and of the site.
    """

    name: str
    targets: dict[str, TrackedTensor]
    tracked: list[tuple[Any, TrackedTensor]]
    rows: Any
    captured: "_Kept"
    rule: Rule
    key: Any
    sites: dict[tuple[int, int], tuple[Site, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Kept:
    """What a `Captured` says, without its tensors."""

    saves: bool
    lead: int
    factors: Any
    order: tuple[int, ...]


class Settled:
    """What a session remembers of operations."""

    def __init__(self, session: "Session") -> None:
        """Start with nothing met.

        Args:
            session: Whose forwards they belong to.
        """
        self._session = session
        self._forms: dict[Any, _Form] = {}

    def forget(self) -> None:
        """Decide anew on everything: evidence speaks against a decision, or parameters were exchanged."""
        self._forms.clear()

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation as it was run before.

        Args:
            func: The torch function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            Its result in the graph; ``NotImplemented`` where it must be decided on.
        """
        form = self._forms.get(_key_of(func, args, kwargs))
        if form is None or in_backward() or not torch.is_grad_enabled():
            return NotImplemented
        rows: Tensor = args[form.rows] if type(form.rows) is int else kwargs[form.rows]
        use = self._use(form, rows)
        if use is None:
            return NotImplemented
        positional, named = list(args), dict(kwargs)
        for place, tracked in form.tracked:
            if type(place) is int:
                positional[place] = tracked.origin.value
            else:
                named[place] = tracked.origin.value
        kept = form.captured
        saved = (rows,) if kept.saves else ()
        return carry_out(
            self._session, use, lambda: func(*positional, **named), rows=rows, saved=saved, order=kept.order
        )

    def _use(self, form: _Form, rows: Tensor) -> Use | None:
        """Return the use of a form that was met before, or None where something is different now."""
        session = self._session
        record = session.record
        visits, call_key = record.visits, ("call", form.key)
        visit = visits[call_key] + 1, visits[form.key] + 1
        (site, known), entry = form.sites.get(visit, (None, UNKNOWN)), rule_for(form.name)
        if site is None or site.attempts < MAX_ATTEMPTS or entry is None or entry[0] is not form.rule:
            return None
        if record.grown is not None or (not rows.requires_grad and known < 0):
            return None
        sizes = tuple(rows.shape[: form.captured.lead])
        maps = row_maps(session, rows, sizes, known)
        if not maps or maps[0].kind == "listed" or (not rows.requires_grad and session.watch.rows_of(rows) is not None):
            return None
        visits[call_key], visits[form.key] = visit
        kept = form.captured
        use = Use(site, record, form.targets, kept.factors, kept.lead, maps, lead_sizes=sizes)
        use.behind = rows.grad_fn
        use.wants_input_gradient = rows.requires_grad
        return use

    def learn(self, operation: Operation, use: Use, captured: Captured, known: int) -> None:
        """Remember how an operation was consumed by its rule, if that follows from the form of its arguments.

        Args:
            operation: The operation.
            use: Its use.
            captured: What the rule made of it.
            known: The axis of its rows that holds samples, as far as it is known.
        """
        record, rows = use.record, captured.rows
        # With one sample every axis may hold it: what is met then says nothing about more.
        if (
            record.batch_size < 2
            or in_backward()
            or not follows_from_form(operation.name)
            or use.maps[0].kind == "listed"
        ):
            return
        # Rows that a rule has turned (products, tracked inputs) are another object; what it captures follows sizes.
        if len(operation.plain) != 1 or operation.plain[0] is not rows:
            return
        if any(tensor is not rows for tensor in captured.saved) or any(t.origin.func for t in operation.tracked):
            return
        key = _key_of(operation.func, operation.args, operation.kwargs)
        if key is None:
            return
        form, entry = self._forms.get(key), rule_for(operation.name)
        if form is None or entry is None or form.rule is not entry[0]:
            if len(self._forms) >= _MOST:
                self._forms.clear()
            self._forms[key] = self._form(operation, use, captured)
        place = self._forms[key].key
        self._forms[key].sites[record.visits["call", place], record.visits[place]] = use.site, known

    def _form(self, operation: Operation, use: Use, captured: Captured) -> _Form:
        arguments: list[tuple[Any, Any]] = [*enumerate(operation.args), *operation.kwargs.items()]
        entry = rule_for(operation.name)
        assert entry is not None
        return _Form(
            name=operation.name,
            targets=use.targets,
            tracked=[(place, item) for place, item in arguments if isinstance(item, TrackedTensor)],
            rows=next(place for place, item in arguments if item is captured.rows),
            captured=_Kept(bool(captured.saved), captured.lead, captured.factors, captured.order),
            rule=entry[0],
            key=key_of(operation.tracked, operation.name),
        )


def _key_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what tells an operation from others: the function, its parameters, the form of everything else.

    None where an argument is a container of tensors, or an object whose value is not its own.
    """
    key: list[Any] = [func]
    for item in args:
        form = _form_of(item)
        if form is NotImplemented:
            return None
        key.append(form)
    for name, item in kwargs.items():
        form = _form_of(item)
        if form is NotImplemented:
            return None
        key.append((name, form))
    return tuple(key)


def _form_of(item: Any) -> Any:
    kind = type(item)
    if kind is TrackedTensor:
        return id(item)
    if kind is Tensor:
        return Tensor, item.dim(), item.dtype, item.requires_grad, item.layout
    if kind in _VALUES:
        return kind, item
    if (kind is tuple or kind is list or kind is torch.Size) and all(type(part) is int for part in item):
        return tuple(item)
    return NotImplemented
