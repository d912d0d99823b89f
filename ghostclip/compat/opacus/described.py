"""Names for a part of a class's instances, so that `isinstance` answers as scripts for Opacus expect."""

from __future__ import annotations

from typing import Any


class Described(type):
    """Metaclass of a class that adds nothing to its base but a way to make one: what counts is what an object does.

    An object made in another way (by `PrivacyEngine.make_private`, say) is an instance of the named class too, if it is
    one of the base and the class method `describes` says so.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        """Ask the class, if it is one that describes and not derived from one."""
        describes = vars(cls).get("describes")
        if describes is None:
            return type.__instancecheck__(cls, instance)
        return type.__instancecheck__(cls.__mro__[1], instance) and bool(describes.__get__(None, cls)(instance))
