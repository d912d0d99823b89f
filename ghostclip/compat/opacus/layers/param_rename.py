"""Parameters under another name than the one they are made under."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ghostclip import _torch
from ghostclip.compat.opacus._refused import refusing

__getattr__ = refusing(__name__)


class RenameParamsMixin:
    """A module whose parameters appear under other names: those of a reference layer that it replaces.

    A parameter is registered on the module itself under its new name as well, where ``named_parameters`` of any module
    around it finds it first; ``state_dict`` holds the new names alone, and loading accepts them, however deep the
    module lies. Write it before ``nn.Module`` among the base classes.
    """

    def set_rename_map(self, rename_map: Mapping[str, str]) -> None:
        """Say which parameters have other names, also of those that are added later.

        Args:
            rename_map: New name by old name; the old ones dotted where a submodule has the parameter.
        """
        module = _module(self)
        first = "old_to_new" not in vars(self)
        self.old_to_new = dict(rename_map)
        self.new_to_old = {new: old for old, new in rename_map.items()}
        if first:
            module.register_state_dict_post_hook(_without_old_names)
            module.register_load_state_dict_pre_hook(_with_old_names)
        self._register_renamed()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a parameter that comes with it gets its new name at once."""
        super().__setattr__(name, value)
        if isinstance(value, (nn.Module, nn.Parameter)) and "old_to_new" in vars(self):
            self._register_renamed()

    def _register_renamed(self) -> None:
        module = _module(self)
        for old, new in self.old_to_new.items():
            owner, _, key = old.rpartition(".")
            try:
                found = _torch.parameter_table(module.get_submodule(owner)).get(key)
            except AttributeError:
                continue
            if found is not None and _torch.parameter_table(module).get(new) is not found:
                module.register_parameter(new, found)
                if not owner:
                    # Listed before its old name, of which it takes the place.
                    own = _torch.parameter_table(module)
                    own[key] = own.pop(key)


def _module(mixed: Any) -> nn.Module:
    assert isinstance(mixed, nn.Module)
    return mixed


def _without_old_names(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for old in module.old_to_new:
        state_dict.pop(prefix + old, None)


def _with_old_names(module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for old, new in module.old_to_new.items():
        if prefix + new in state_dict:
            state_dict.setdefault(prefix + old, state_dict[prefix + new])
