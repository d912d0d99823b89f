"""The public names: what is promised exists, what exists is promised, and each explains itself."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import ghostclip
from ghostclip._validate import suggests_options
from tests.project.source import module_name, python_files

PACKAGES = sorted({module_name(path) for path in python_files("ghostclip") if path.name == "__init__.py"})
# What a user's script names. Taking one away breaks scripts, so it is done here on purpose or not at all.
PROMISED = {"GhostClipper", "PrivacyEngine", "__version__", "register_rule", "validate"}


def test_promised_names_are_public():
    assert set(ghostclip.__all__) >= PROMISED


@pytest.mark.parametrize("name", PACKAGES)
def test_all_names_exist_once(name):
    package = importlib.import_module(name)
    public = getattr(package, "__all__", [])
    assert len(public) == len(set(public)), f"{name}.__all__ names something twice"
    for entry in public:
        assert getattr(package, entry) is not None
        assert entry in dir(package), f"dir({name}) hides {entry}"


def test_nothing_public_is_left_out():
    """Whatever of ours a user can reach as `ghostclip.X`, and that is not a module, is in `__all__`."""
    for name in ghostclip.__all__:
        getattr(ghostclip, name)
    reachable = {
        name
        for name, value in vars(ghostclip).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("ghostclip")
    }
    assert reachable <= set(ghostclip.__all__)


def test_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="'GhostCliper'; did you mean 'GhostClipper'"):
        _ = ghostclip.GhostCliper
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        _ = ghostclip.xyzzy


def test_dir_shows_what_is_public_and_nothing_else():
    shown = dir(ghostclip)
    modules = {name for name in shown if inspect.ismodule(getattr(ghostclip, name))}
    assert set(shown) - modules == set(ghostclip.__all__) - modules
    assert not {name for name in modules if name.startswith("_")}
    assert {getattr(ghostclip, name).__name__ for name in modules} == {f"ghostclip.{name}" for name in modules}


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"clipping": "automtic"}, "automatic"),
        ({"grad_sample_mode": "gost"}, "ghost"),
        ({"grad_sample_mode": "bookeeping"}, "bookkeeping"),
        ({"loss_reduction": "meen"}, "mean"),
    ],
)
def test_option_that_is_misspelt_says_what_was_meant(options, meant):
    import torch

    model = torch.nn.Linear(2, 1)
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "data_loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        ghostclip.PrivacyEngine().make_private(**given, **options)


@pytest.mark.parametrize(
    ("options", "meant"), [({"accountant": "rpd"}, "rdp"), ({"noise_level": "secur"}, "secure")], ids=str
)
def test_engine_says_what_was_meant(options, meant):
    with pytest.raises(ValueError, match=rf"did you mean '{meant}'\?(\n|$)"):
        ghostclip.PrivacyEngine(**options)


def test_every_error_derives_from_the_base_and_a_builtin():
    from ghostclip import errors

    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    for error in classes:
        if issubclass(error, Warning):
            continue
        assert issubclass(error, errors.GhostClipError)
        builtin = [
            base
            for base in error.__mro__
            if base.__module__ == "builtins" and base not in (Exception, BaseException, object)
        ]
        assert builtin or error is errors.GhostClipError, (
            f"{error.__name__} derives from no built-in a user would catch"
        )


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: ghostclip.PrivacyEngine(noise_levle="fast"), "noise_level"),
        (lambda: ghostclip.PrivacyEngine().make_private(noise_multiplyer=1.0), "noise_multiplier"),
        (lambda: ghostclip.PrivacyEngine().make_private_with_epsilon(target_eps=1.0), "target_epsilon"),
        (lambda: ghostclip.GhostClipper(torch.nn.Linear(2, 2), max_gradnorm=1.0), "max_grad_norm"),
        (lambda: ghostclip.BatchMemoryManager(max_physical_batchsize=1), "max_physical_batch_size"),
        (lambda: ghostclip.get_noise_multiplier(sample_rat=0.1), "sample_rate"),
    ],
)
def test_an_unknown_option_names_the_one_that_is_near(call, meant):
    with pytest.raises(TypeError, match=f"(?i)did you mean '{meant}'"):
        call()


def test_only_the_call_itself_is_answered_with_a_suggestion():
    """What goes wrong inside a function keeps its own words."""

    def inner(value: int) -> int:
        return value

    @suggests_options
    def outer(values: int) -> int:
        return inner(valeu=values)

    with pytest.raises(TypeError, match=r"inner\(\) got an unexpected keyword argument 'valeu'") as found:
        outer(values=1)
    assert "'values'" not in str(found.value)
